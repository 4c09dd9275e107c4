"""Operands of attention over a mesh, the same on one device, and what crosses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import neuronjax
from tests.hlo import collectives

DEVICES = (2, 3, 5, 8)
BY_HEAD = {"q", "k", "v", "k_prior", "v_prior", "sink", "bias", "mask"}
FLOATS = ("q", "k", "v", "k_prior", "v_prior", "sink", "bias")
# Each option of `attention_cte` with its operands, `sizes` as (batch, heads, kv heads,
# sequence), a prefix of 5 slots where there is one.
OPTIONS = {
    "full": dict(causal_mask=False),
    "window": dict(sliding_window=3),
    "sink": dict(sink=(1, "heads", 1)),
    "sink of each sequence": dict(sink=("batch", "heads", 1), sliding_window=4),
    "prefix": dict(
        k_prior=("batch", "kv_heads", 4, 5),
        v_prior=("batch", "kv_heads", 5, 3),
        prior_used_len=3,
    ),
    "prefix, window, sink": dict(
        k_prior=("batch", "kv_heads", 4, 5),
        v_prior=("batch", "kv_heads", 5, 3),
        prior_used_len=4,
        sliding_window=6,
        sink=(1, "heads", 1),
    ),
    "bias": dict(bias=("batch", "heads", "seq", "seq")),
    "bias of a head": dict(bias=(1, "heads", 1, "seq"), causal_mask=False),
    "bias of a sequence": dict(bias=("batch", 1, "seq", 1)),
    "bias of a column": dict(bias=(1, 1, 1, "seq")),
    "mask": dict(mask=("batch", 1, "seq", "seq")),
    "statistics": dict(cache_softmax=True, sink=(1, "heads", 1)),
    "layouts, soft cap": dict(
        tp_q=False, tp_k=True, tp_out=True, cache_softmax=True, logits_soft_cap=1.5
    ),
}


def operands(batch, heads, kv_heads, seq, option):
    """Random operands for an option; sequences in natural order."""
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, seq=seq)
    rng = np.random.default_rng(len(option) + seq)

    def draw(*shape):
        shape = [sizes.get(n, n) for n in shape]
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    given = dict(OPTIONS[option])
    arrays = dict(
        q=draw("batch", "heads", "seq", 4),
        k=draw("batch", "kv_heads", 4, "seq"),
        v=draw("batch", "kv_heads", "seq", 3),
    )
    if given.get("tp_k"):
        arrays["k"] = arrays["k"].mT
    if not given.get("tp_q", True):
        arrays["q"] = arrays["q"].mT
    for name in BY_HEAD & given.keys():
        arrays[name] = draw(*given.pop(name))
    if "mask" in arrays:
        arrays["mask"] = arrays["mask"] > 0
    if "prior_used_len" in given:
        arrays["prior_used_len"] = jnp.asarray([given["prior_used_len"]], jnp.int32)
        del given["prior_used_len"]
    return arrays, given


def alone(arrays, static):
    """One device: batch and heads folded, and everything spread over them."""
    lead = arrays["q"].shape[:2]

    def fold(name, x):
        if name not in BY_HEAD:
            return x
        if name in ("sink", "bias", "mask"):
            x = jnp.broadcast_to(x, (*lead, *x.shape[2:]))
        return lax.collapse(x, 0, 2)

    folded = {name: fold(name, x) for name, x in arrays.items()}
    outs = neuronjax.attention_cte(**folded, **static)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), outs)


def split(function, arrays, static):
    q, k, v = (arrays[n] for n in "qkv")
    return function(
        q, k, v, **{n: arrays[n] for n in arrays if n not in "qkv"} | static
    )


def value_and_gradient(run, arrays):
    """Outputs, and the gradient of a sum that weighs every element differently."""
    floats = {n: x for n, x in arrays.items() if n in FLOATS}
    others = {n: x for n, x in arrays.items() if n not in FLOATS}

    def total(floats):
        outs = jax.tree.leaves(run(floats | others))
        waves = (jnp.sin(jnp.arange(x.size, dtype=x.dtype)) for x in outs)
        flat = (x.ravel() for x in outs)
        return sum(jnp.vdot(x, w) for x, w in zip(flat, waves, strict=True)), outs

    (_, outs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(floats)
    return outs, grads


def agree(run, wanted, arrays):
    got, expected = (value_and_gradient(f, arrays) for f in (run, wanted))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def costs(mesh, function, specs, option, seq=6):
    """Collectives forward, and of forward and backward together."""
    arrays, static = operands(2, 4, 2, seq, option)

    def place(name, x):
        spec = specs.get(name, P())
        whole = (
            axis if n > 1 else None for axis, n in zip(spec, x.shape, strict=False)
        )
        return jax.device_put(x, jax.NamedSharding(mesh, P(*whole)))

    placed = {n: place(n, x) for n, x in arrays.items()}
    floats = {n: x for n, x in placed.items() if n in FLOATS}
    others = {n: x for n, x in placed.items() if n not in FLOATS}

    def run(floats):
        return split(function, floats | others, static)

    def both(floats, cotangent):
        out, pull = jax.vjp(run, floats)
        return out, *pull(cotangent)

    out = jax.jit(run)(floats)
    return collectives(run, floats), collectives(both, floats, out)
