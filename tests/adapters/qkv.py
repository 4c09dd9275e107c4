"""Cases of `qkv`, `qkv_cte` and `qkv_tkg`."""

import jax.numpy as jnp

import neuronjax
from tests.adapters import adapter

# What the reference needs to make its caches, and what has no other value yet.
_NO_OPTION = ("num_blocks", "max_seq_len", "lnc", "output_in_sbuf")


def _outputs(outs, cached):
    names = ("q_tensor_hbm", "k_cache", "v_cache") if cached else ("out",)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return dict(zip((*names, "fused_hidden"), outs, strict=False))


def _caches(inputs, options):
    """Caches of zeros, as the reference starts with."""
    batch, seq, _ = inputs["input"].shape
    shape = (batch, options.get("max_seq_len", seq))
    if options.get("use_block_kv"):
        shape = (options["num_blocks"], options["block_size"])
    shape += (options["num_kv_heads"] * options["d_head"],)
    names = [name for name in ("k_cache", "v_cache") if name not in inputs]
    return {name: jnp.zeros(shape, options["kv_dtype"]) for name in names}


def _call(function, inputs, options):
    cached = "kv_dtype" in options
    caches = _caches(inputs, options) if cached else {}
    options = {k: v for k, v in options.items() if k not in _NO_OPTION}
    return _outputs(function(**inputs, **caches, **options), cached)


@adapter("qkv")
def qkv(inputs, options):
    return _call(neuronjax.qkv, inputs, options)


@adapter("qkv_cte")
def qkv_cte(inputs, options):
    return _call(neuronjax.qkv_cte, inputs, options)


@adapter("qkv_tkg")
def qkv_tkg(inputs, options):
    return _call(neuronjax.qkv_tkg, inputs, options)
