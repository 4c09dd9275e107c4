"""RoPE and rope_hf, against float64 equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax


def _turn(x, cos, sin, pairs):
    """RoFormer, equation 34, pair by pair: `x [d, ...]`, tables half as wide."""
    out = np.empty_like(x)
    for i, (a, b) in enumerate(pairs):
        out[a] = x[a] * cos[i] - x[b] * sin[i]
        out[b] = x[a] * sin[i] + x[b] * cos[i]
    return out


def _pairs(d, interleaved):
    half = d // 2
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]


def _draw(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(64, 2, 3, 5), (2, 1, 1, 1), (128, 1, 8, 50)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)]
)
def test_pairs_are_rotated(shape, interleaved, dtype, tolerance):
    d, batch, _, seq = shape
    x, cos, sin = (
        jnp.asarray(_draw(*s, seed=i), dtype)
        for i, s in enumerate([shape, (d // 2, batch, seq), (d // 2, batch, seq)])
    )
    got = neuronjax.RoPE(x, cos, sin, contiguous_layout=not interleaved)
    wide = [np.asarray(t, np.float64) for t in (x, cos, sin)]
    tables = [t[:, :, None] for t in wide[1:]]
    wanted = _turn(wide[0], *tables, _pairs(d, interleaved))
    assert got.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance
    )


def test_the_layouts_of_the_docstring():
    """R-18: half-split [-3, 2, 1, 4], interleaved [-2, 1, 3, 4]."""
    x = jnp.array([1.0, 2, 3, 4]).reshape(4, 1, 1, 1)
    angles = jnp.array([np.pi / 2, 0]).reshape(2, 1, 1)
    for contiguous, wanted in ((True, [-3, 2, 1, 4]), (False, [-2, 1, 3, 4])):
        got = neuronjax.RoPE(
            x, jnp.cos(angles), jnp.sin(angles), contiguous_layout=contiguous
        )
        np.testing.assert_allclose(got.ravel(), wanted, atol=1e-6)


@pytest.mark.parametrize("contiguous", [False, True])
def test_gradients_are_those_of_the_map_and_not_of_a_rotation(contiguous):
    x, cos, sin = _draw(6, 2, 3, 4), _draw(3, 2, 4, seed=1), _draw(3, 2, 4, seed=2)
    with jax.enable_x64(True):
        check_grads(
            jax.jit(lambda *a: neuronjax.RoPE(*a, contiguous_layout=contiguous)),
            tuple(map(jnp.asarray, (x, cos, sin))),
            2,
        )


@pytest.mark.parametrize("tables", ["batched", "shared", "cache", "shared cache"])
def test_hugging_face_form_reads_every_column(tables):
    q, k = _draw(2, 4, 5, 8, dtype=np.float32), _draw(2, 2, 5, 8, dtype=np.float32)
    shape = (5, 8) if "shared" in tables else (2, 5, 8)
    cos, sin = (_draw(*shape, seed=i, dtype=np.float32) for i in (1, 2))
    given = dict(cos=jnp.asarray(cos), sin=jnp.asarray(sin))
    if "cache" in tables:
        given = dict(rope_cache=jnp.concatenate([cos, sin], -1))
    wide = [np.broadcast_to(t, (2, 5, 8))[:, None] for t in (cos, sin)]
    for got, x in zip(neuronjax.rope_hf(q, k, **given), (q, k), strict=True):
        turned = np.concatenate([-x[..., 4:], x[..., :4]], -1)
        np.testing.assert_allclose(got, x * wide[0] + turned * wide[1], atol=1e-5)


def test_hugging_face_backward_is_the_transpose():
    q, k, cos, sin = (
        jnp.asarray(_draw(*s, seed=i, dtype=np.float32))
        for i, s in enumerate([(1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8)])
    )
    _, pull = jax.vjp(lambda q, k: neuronjax.rope_hf(q, k, cos, sin), q, k)
    dq, dk = jnp.cos(q), jnp.sin(k)
    got = neuronjax.rope_hf(dq, dk, cos, sin, backward=True)
    for a, b in zip(got, pull((dq, dk)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_placement_hints_travel_in_the_config_and_change_no_value():
    x, table = jnp.ones((64, 1, 2, 8)), jnp.ones((32, 1, 8))
    hinted = lambda *a: neuronjax.RoPE(*a, lnc_shard=True, relayout_in_sbuf=True)  # noqa: E731
    (row,) = neuronjax.trace(hinted, x, table, table).rows
    assert dict(row.config)["lnc_shard"] is True
    np.testing.assert_array_equal(
        hinted(x, table, table), neuronjax.RoPE(x, table, table)
    )


def test_a_rotation_keeps_lengths():
    x, angles = _draw(64, 1, 1, 9, dtype=np.float32), _draw(32, 1, 9, dtype=np.float32)
    got = neuronjax.RoPE(x, jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_allclose(
        np.linalg.norm(got, axis=0), np.linalg.norm(x, axis=0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contiguous_layout": "interleaved"}, "contiguous_layout = 'interleaved'"),
        ({"lnc_shard": 1}, "lnc_shard = 1"),
        ({"x_in": np.ones((4, 1, 1, 2), np.int32)}, "x_in of dtype int32"),
        ({"x_in": np.ones((4, 1, 1, 2), jnp.float8_e4m3fn)}, "x_in of dtype float8"),
        ({"cos": np.ones((2, 1, 2), np.int32)}, "cos of dtype int32"),
        ({"sin": None}, "sin of type NoneType"),
    ],
)
def test_what_would_be_rotated_wrongly_is_refused(changes, words):
    """R-18: a layout by name would be taken for True, integers would be cut off."""
    table = np.ones((2, 1, 2), np.float32)
    given = dict(x_in=np.ones((4, 1, 1, 2), np.float32), cos=table, sin=table)
    with pytest.raises(ValueError, match=f"RoPE: .*{words}"):
        neuronjax.RoPE(**given | changes)


def test_the_emitter_keeps_the_rules_of_both_forms():
    x, table = jnp.ones((4, 2, 1, 3)), jnp.ones((2, 1, 3))
    with pytest.raises(ValueError, match=r"\(2, 2, 3\), got \(2, 1, 3\)"):
        neuronjax.emit.rope_kernel(x, table, table)
    with pytest.raises(ValueError, match=r"\[batch, seq, d\] = \(4, 1, 3\)"):
        neuronjax.emit.rope_kernel(x, table, table, full=True)
    with pytest.raises(ValueError, match="interleaved = 'no'"):
        neuronjax.emit.rope_kernel(x[:, :1], table, table, interleaved="no")
