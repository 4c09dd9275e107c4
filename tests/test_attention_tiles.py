"""Prefill attention on tiles, and what its raw emitters take and refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.emit import (
    attention_kernel,
    attention_prefix_caching_fwd_kernel,
)
from neuronjax.kernels.attention.options import Extras
from neuronjax.primitives import registry
from tests.prefill_case import BACKWARD, draw

Tile = neuronjax.MemrefTile


def _tiles(q, k, v):
    return Tile.from_tensor(q, 2), Tile.from_tensor(k.mT, 1), Tile.from_tensor(v, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (256, 128)])
def test_tiles_equal_tensors(lengths, causal):
    arrays = draw(*lengths)
    call = functools.partial(neuronjax.attention_cte, scale=0.4, causal_mask=causal)

    def tiled(*arrays):
        return call(*_tiles(*arrays)).to_tensor()

    def plain(q, k, v):
        return call(q, k.mT, v)

    outs, pulls = zip(*(jax.vjp(f, *arrays) for f in (tiled, plain)), strict=True)
    np.testing.assert_allclose(*outs, rtol=1e-4, atol=1e-5)
    for a, b in zip(*(pull(jnp.cos(outs[1])) for pull in pulls), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    grad = jax.grad(lambda *a: tiled(*a).sum(), (0, 1, 2))
    traced = neuronjax.trace(grad, *arrays)
    assert traced.names == ("TiledNativeKernelAttention", BACKWARD)


def test_a_tiled_leaf_keeps_its_operands_tiled():
    """No operand takes its untiled shape; the result is a tile."""
    q, k, v = _tiles(*draw(256, 256))
    family = registry.resolve_family("TiledNativeKernelAttention")
    config = dict(scale=1.0, is_causal=True, is_tiled=True)
    config |= dict(tp_q=True, tp_k=False, tp_out=False)
    leaf = functools.partial(family.leaf, name="TiledNativeKernelAttention", **config)
    jaxpr = jax.make_jaxpr(leaf)(q.data, k.data, v.data, Extras())
    whole = {tuple(sorted(x.shape)) for x in (q, k, v)}
    for equation in jaxpr.eqns:
        if any(x is y for x in equation.invars for y in jaxpr.jaxpr.invars):
            shapes = {tuple(sorted(o.aval.shape)) for o in equation.outvars}
            assert not shapes & whole, equation
    assert jaxpr.out_avals[0].shape == (128, 2, 6, 6)


def test_tiles_refuse_what_they_cannot_do():
    q, k, v = _tiles(*draw(5, 7))
    message = (
        "Softmax caching not supported yet for tiled attention_kernel. Pass in tensors "
        "instead of tiles."
    )
    with pytest.raises(ValueError) as refusal:
        neuronjax.attention_cte(q, k, v, cache_softmax=True)
    assert message in str(refusal.value).splitlines()
    mix = (
        "Inputs/outputs to attention_kernel must be all tensors or all tiles, not a mix"
    )
    with pytest.raises(ValueError, match=mix):
        attention_kernel(q, k, v.to_tensor())
    rows = [jnp.zeros((1, 50048, 1))] * 3
    with pytest.raises(ValueError, match="tiles must fit SBUF of gen3"):
        jax.eval_shape(neuronjax.attention_cte, *_tiles(*rows))


@pytest.mark.parametrize("window", [None, 0])
def test_no_window_is_no_window(window):
    """R-04: 0 and None."""
    q, k, v = draw(3, 3)
    got = neuronjax.attention_cte(q, k.mT, v, sliding_window=window)
    np.testing.assert_array_equal(got, neuronjax.attention_cte(q, k.mT, v))


@pytest.mark.parametrize("name", ["Nonsense", "AttentionMMSoftmaxMM"])
def test_prefix_caching_is_keyed_by_name(name):
    """R-27."""
    q, k, v = draw(3, 4)
    operands = q.mT, k.mT, v, k.mT, v
    message = f"Prefix caching is not implemented for this kernel name {name}"
    with pytest.raises(ValueError) as refusal:
        attention_prefix_caching_fwd_kernel(*operands, kernel_name=name)
    assert message in str(refusal.value).splitlines()


@pytest.mark.parametrize(
    ("option", "emitter"),
    [
        ("k_active", "attention_tkg_fwd_kernel"),
        ("v_active", "attention_tkg_fwd_kernel"),
        ("rope_pos_ids", "attention_tkg_fwd_kernel"),
        ("k_prior", "attention_prefix_caching_fwd_kernel"),
        ("prefix_mask", "attention_prefix_caching_fwd_kernel"),
    ],
)
def test_an_operand_of_another_emitter_is_refused_with_its_name(option, emitter):
    """R-27."""
    q, k, v = draw(3, 3)
    message = f"attention_kernel: {option} is an operand of {emitter}, not of this one"
    with pytest.raises(ValueError, match=message):
        attention_kernel(q, k.mT, v, tp_q=True, **{option: jnp.zeros(1)})


def test_hints_change_no_value_and_a_destination_gives_its_dtype():
    q, k, v = draw(3, 4)
    plain = attention_kernel(q, k.mT, v, tp_q=True)
    hinted = functools.partial(attention_kernel, tp_q=True, num_stages=2, num_tiles=4)
    np.testing.assert_array_equal(hinted(q, k.mT, v), plain)
    (row,) = neuronjax.trace(hinted, q, k.mT, v).rows
    assert dict(row.config)["num_stages"] == 2
    out = attention_kernel(
        q, k.mT, v, out=jnp.zeros((6, 3, 6), jnp.bfloat16), tp_q=True
    )
    assert out.dtype == jnp.bfloat16


def test_the_chips_layout_of_the_statistics_and_back():
    rows = jnp.arange(2 * 384.0).reshape(2, 384, 1)
    tiles = neuronjax.statistics_to_tiles(rows)
    assert tiles.shape == (2, 128, 3) and tiles[1, 5, 2] == rows[1, 2 * 128 + 5, 0]
    np.testing.assert_array_equal(neuronjax.statistics_from_tiles(tiles), rows)
    with pytest.raises(ValueError, match="q_seq a multiple of 128"):
        neuronjax.statistics_to_tiles(rows[:, :100])
