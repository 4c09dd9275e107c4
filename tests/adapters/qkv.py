"""Cases of `qkv`, `qkv_cte` and `qkv_tkg`."""

import neuronjax
from tests.adapters import adapter

# What the reference needs to make its caches, and what has no other value yet.
_NO_OPTION = ("num_blocks", "max_seq_len", "lnc", "output_in_sbuf")


def _outputs(outs):
    names = ("out", "fused_hidden")
    outs = outs if isinstance(outs, tuple) else (outs,)
    return dict(zip(names, outs, strict=False))


def _call(function, inputs, options):
    options = {k: v for k, v in options.items() if k not in _NO_OPTION}
    return _outputs(function(**inputs, **options))


@adapter("qkv")
def qkv(inputs, options):
    return _call(neuronjax.qkv, inputs, options)


@adapter("qkv_cte")
def qkv_cte(inputs, options):
    return _call(neuronjax.qkv_cte, inputs, options)


@adapter("qkv_tkg")
def qkv_tkg(inputs, options):
    return _call(neuronjax.qkv_tkg, inputs, options)
