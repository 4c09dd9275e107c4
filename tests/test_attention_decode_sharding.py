"""Decode attention split over batch and heads equals one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from neuronjax.emit import attention_tkg_fwd_kernel
from neuronjax.sharding import make_mesh, sharded_attention_tkg
from tests.attention_mesh import DEVICES
from tests.decode_case import draw
from tests.hlo import collectives

FLOATS = ("q", "k_active", "v_active", "k_prior", "v_prior", "sink", "inv_freqs")


def _operands(batch, heads, kv_heads, form):
    """A window of each query and a sink; `rope`, `mask`, or a shared `blocks` cache."""
    *cached, sink = draw((batch, heads, kv_heads, 2, 6, 4, 3))
    arrays = dict(zip(FLOATS, (*cached, sink), strict=False))
    row = jnp.arange(batch, dtype=jnp.int32)
    starts = (row[:, None] + jnp.array([4, 1], jnp.int32)) % 6
    arrays |= dict(lengths=(3 + 2 * row) % 7, start_pos_ids=starts)
    if form == "rope":
        arrays["inv_freqs"] = jnp.array([[0.7], [0.2]])
        arrays["rope_pos_ids"] = row[:, None] + jnp.arange(2, dtype=jnp.int32)
    if form == "mask":
        del arrays["lengths"], arrays["start_pos_ids"]
        shape = (8, batch, heads, 2)
        arrays["mask"] = jnp.asarray(np.random.default_rng(1).random(shape) < 0.6)
    if form == "blocks":  # some shared by all sequences
        rng = np.random.default_rng(2)
        for name, width in (("k_prior", 4), ("v_prior", 3)):
            cache = rng.normal(size=(5, kv_heads, 2, width))
            arrays[name] = jnp.asarray(cache, jnp.float32)
        table = jnp.stack([row % 3, row % 2 + 3, row - row - 1], 1)
        arrays["active_blocks_table"] = table
    return arrays


def _results(run, arrays):
    """Outputs, and the gradients of a sum that weighs every element differently."""
    floats = {n: arrays[n] for n in FLOATS if n in arrays}

    def total(floats):
        outs = jax.tree.leaves(run(**arrays | floats, tp_k_prior=True))
        waves = (jnp.sin(jnp.arange(x.size, dtype=x.dtype)) for x in outs)
        pairs = zip(outs, waves, strict=True)
        return sum(jnp.vdot(x.ravel(), w) for x, w in pairs), outs

    return jax.jit(jax.value_and_grad(total, has_aux=True))(floats)


FORMS = [("rope", "batch"), ("mask", "heads"), ("blocks", "batch")]


@pytest.mark.parametrize(
    ("devices", "form", "axes"),
    [*((n, *form) for n in DEVICES for form in FORMS), (3, "blocks", "heads")],
)
def test_a_mesh_equals_one_device(devices, form, axes):
    over = axes == "batch"
    sizes = (devices, 2, 1) if over else (2, 2 * devices, devices)
    arrays = _operands(*sizes, form)
    split = functools.partial(
        sharded_attention_tkg,
        make_mesh(data=devices),
        batch="data" if over else None,
        heads=None if over else "data",
    )
    got, wanted = (_results(f, arrays) for f in (split, attention_tkg_fwd_kernel))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "live", "backward"),
    [
        ("mask", FLOATS[:5], {}),
        ("mask", FLOATS[:6], {"all-reduce": 1}),
        ("blocks", FLOATS[:3], {}),
    ],
)
def test_only_what_sequences_share_crosses_and_only_backward(form, live, backward):
    mesh = make_mesh(data=2, tensor=2)
    arrays, lead = _operands(2, 4, 2, form), P("data", "tensor")
    specs = dict.fromkeys(FLOATS[:5], lead) | dict(sink=P("tensor"))
    specs |= dict(mask=P(None, "data", "tensor"))
    if form == "blocks":
        specs |= dict.fromkeys(("k_prior", "v_prior"), P(None, "tensor"))
        by_row = ("lengths", "start_pos_ids", "active_blocks_table")
        specs |= dict.fromkeys(by_row, P("data"))
    arrays = {
        n: jax.device_put(x, jax.NamedSharding(mesh, specs[n]))
        for n, x in arrays.items()
    }
    split = functools.partial(sharded_attention_tkg, mesh, batch="data")

    def run(arrays, floats):
        return split(**arrays | floats, tp_k_prior=True)

    def both(arrays, floats, cotangent):
        out, pull = jax.vjp(lambda floats: run(arrays, floats), floats)
        return out, *pull(cotangent)

    floats = {n: arrays[n] for n in live}
    out = jax.jit(run)(arrays, floats)
    assert collectives(run, arrays, floats) == {}
    assert collectives(both, arrays, floats, out) == backward


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(batch="rows"),
            "sharded_attention_tkg: batch must be an axis of the mesh",
        ),
        (dict(heads="data"), r"multiples of the 3 devices of 'data', got q \(2, 4, 2"),
        (dict(lengths=jnp.array([3, 7])), r"lengths must lie in \[0, 6\]"),
        (
            dict(batch="tensor", heads=None, v_prior=jnp.zeros((4, 2, 6, 3))),
            "a flat cache must have a row for each of the 2 sequences, got 4",
        ),
    ],
)
def test_what_a_mesh_cannot_split_is_refused(changes, words):
    arrays = _operands(2, 4, 2, "flat") | changes
    if "v_prior" in changes:
        arrays["k_prior"] = jnp.zeros((4, 2, 6, 4))
    with pytest.raises(ValueError, match=words):
        mesh = make_mesh(data=3, tensor=2)
        sharded_attention_tkg(mesh, **arrays, tp_k_prior=True)
