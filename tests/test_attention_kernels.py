"""The prefill leaves, block by block, against float64 attention row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neuronjax.kernels.attention.backward import attention_bwd
from neuronjax.kernels.attention.options import Extras, Options
from neuronjax.kernels.attention.plain import attention_bwd_plain, attention_plain
from neuronjax.kernels.attention.prefill import attention_fwd
from neuronjax.kernels.attention.segments import cut_rows, make_segments, visit
from neuronjax.kernels.attention.tiled import attention_tiled_fwd
from tests.attention_equations import attend, gradients, visible

LAYOUT = dict(tp_q=True, tp_k=True, tp_out=False)
NAMES = {
    False: "AttentionMMSoftmaxMMWithoutSwap",
    True: "CausalAttentionMMSoftmaxMMWithoutSwap",
}
# q_seq, kv_seq, mask: one, odd, unequal both ways, one off a block, whole blocks
CALLS = [
    (1, 1, None),
    (9, 1, "full"),
    (7, 12, "keys"),
    (12, 7, None),
    (17, 17, None),
    (16, 16, "full"),
]


def _draw(q_seq, kv_seq, heads=4, kv_heads=2, d=8, dv=6, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (heads, q_seq, d), (kv_heads, kv_seq, d), (kv_heads, kv_seq, dv)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _mask(kind, heads, q_seq, kv_seq):
    if kind is None:
        return None
    shape = dict(full=(heads, q_seq, kv_seq), keys=(1, 1, kv_seq))[kind]
    mask = np.random.default_rng(9).random(shape) < 0.5
    if kind == "full":
        mask[:, 0] = False  # a row that sees nothing
    return jnp.asarray(mask)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "block", "static"))
def _forward(q, k, v, mask, causal, scale=0.5, block=8, static=False):
    settings = dict(LAYOUT, scale=scale, block=block, static=static, is_causal=causal)
    return attention_fwd(q, k, v, Extras(mask=mask), name=NAMES[causal], **settings)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "block", "static"))
def _backward(operands, outs, cotangents, causal, scale=0.5, block=8, static=False):
    settings = dict(LAYOUT, scale=scale, block=block, static=static, is_causal=causal)
    *rows, mask = operands
    stored = *outs, *cotangents
    name = "BackwardsAttention"
    return attention_bwd(*rows, Extras(mask=mask), *stored, name=name, **settings)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_forward_and_backward_of_every_length(call, causal):
    *lengths, kind = call
    q, k, v = _draw(*lengths)
    mask = _mask(kind, 4, *lengths)
    seen = visible(*lengths, causal, mask, heads=4)
    outs = _forward(q, k, v, mask, causal)
    for got, wanted in zip(outs, attend(q, k, v, seen, 0.5)[:3], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    d_out = jnp.cos(outs[0] + 1)
    grads = _backward((q, k, v, mask), outs, (d_out, None, None), causal)
    for got, wanted in zip(grads, gradients(q, k, v, seen, d_out, 0.5), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 256])
def test_the_block_size_changes_nothing(block, static):
    q, k, v = _draw(11, 11)
    seen = visible(11, 11, True, heads=4)
    outs = _forward(q, k, v, None, True, block=block, static=static)
    for got, wanted in zip(outs, attend(q, k, v, seen, 0.5)[:3], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    cotangents = jnp.cos(outs[0]), None, None
    grads = _backward((q, k, v, None), outs, cotangents, True, 0.5, block, static)
    for got, wanted in zip(
        grads, gradients(q, k, v, seen, cotangents[0], 0.5), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [1, 2, 3, 4])
@pytest.mark.parametrize("order", [1, -1])
def test_running_maximum_after_a_fully_masked_tile(block, order):
    """R-02: the first visible scores are far below 0, behind masked blocks or not."""
    k = jnp.array([-200.0, -201, 0, 0])[::order].reshape(1, 4, 1)
    v = jnp.array([1.0, 2, 50, 60])[::order].reshape(1, 4, 1)
    mask = jnp.array([True, True, False, False])[::order].reshape(1, 1, 4)
    out, neg_max, recip = _forward(jnp.ones((1, 1, 1)), k, v, mask, False, 1.0, block)
    np.testing.assert_allclose(out.ravel(), [1.268941], rtol=1e-6)
    lse = -neg_max - jnp.log(recip)
    np.testing.assert_allclose(lse.ravel(), [-199.686738], rtol=1e-7)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_statistics_have_their_true_derivatives(causal, ties):
    """Both modes equal autodiff of the equations; ties of a maximum share evenly."""
    with jax.enable_x64(True):
        q, k, v = _draw(11, 7, dtype=np.float64)
        q = q * 0 if ties else q
        seen = jnp.asarray(visible(11, 7, causal, heads=4))
        run = functools.partial(_forward, mask=None, causal=causal, block=4)

        def wanted(q, k, v):
            keys, values = (jnp.repeat(x, 2, 0) for x in (k, v))
            z = jnp.where(seen, 0.5 * q @ keys.mT, -jnp.inf)
            top = z.max(-1, keepdims=True)
            e = jnp.exp(z - top)
            total = e.sum(-1, keepdims=True)
            return e / total @ values, -top, 1 / total

        outs, pull = jax.vjp(wanted, q, k, v)
        cotangents = tuple(jnp.cos(7 * x + 1) for x in outs)
        grads = _backward((q, k, v, None), outs, cotangents, causal, block=4)
        dots = tuple(jnp.sin(3 * x + 1) for x in (q, k, v))
        pushed = jax.jvp(run, (q, k, v), dots)[1], jax.jvp(wanted, (q, k, v), dots)[1]
        got, true = (*grads, *pushed[0]), (*pull(cotangents), *pushed[1])
        for a, b in zip(got, true, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_an_unused_cotangent_is_skipped_and_changes_nothing():
    q, k, v = _draw(9, 9)
    outs = _forward(q, k, v, None, True)
    zeros = tuple(map(jnp.zeros_like, outs))
    for used in range(3):
        cotangents = [None] * 3
        cotangents[used] = jnp.cos(outs[used])
        whole = [z if c is None else c for z, c in zip(zeros, cotangents, strict=True)]
        got = _backward((q, k, v, None), outs, tuple(cotangents), True)
        wanted = _backward((q, k, v, None), outs, tuple(whole), True)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "d_out"])
def test_what_a_row_does_not_see_does_not_reach_it(which, bad, block):
    """Row 6 or key 6 is bad: causal rows below 6 and keys above 6 stay as they were."""
    q, k, v = _draw(11, 11)
    operands = dict(q=q, k=k, v=v, d_out=jnp.cos(jnp.arange(264.0)).reshape(4, 11, 6))
    results = []
    for x in (operands, operands | {which: operands[which].at[:, 6, 0].set(bad)}):
        triple = x["q"], x["k"], x["v"]
        outs = _forward(*triple, None, True, block=block)
        cotangents = x["d_out"], None, None
        grads = _backward((*triple, None), outs, cotangents, True, block=block)
        results.append((outs[0], *grads))
    (out, dq, dk, dv), (bad_out, bad_dq, bad_dk, bad_dv) = results
    np.testing.assert_allclose(bad_out[:, :6], out[:, :6], rtol=1e-6)
    np.testing.assert_allclose(bad_dq[:, :6], dq[:, :6], rtol=1e-5, atol=1e-6)
    if which in ("q", "d_out"):
        np.testing.assert_allclose(bad_dk[:, 7:], dk[:, 7:], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(bad_dv[:, 7:], dv[:, 7:], rtol=1e-5, atol=1e-6)
    reached = dict(q=bad_out, k=bad_out, v=bad_out, d_out=bad_dv)[which][:, 6]
    if not (which in "qk" and np.isinf(bad)):
        assert np.isnan(np.asarray(reached)).any()


def test_a_hidden_row_may_hold_anything():
    """A row without keys: zero output and gradients, whatever q and its cotangent."""
    q, k, v = _draw(5, 6)
    mask = jnp.ones((1, 5, 6), bool).at[:, 2].set(False)
    outs = _forward(q, k, v, mask, False)
    operands = (q.at[:, 2].set(jnp.nan), k, v, mask)
    again = _forward(*operands, False)
    for a, b in zip(again, outs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not again[0][:, 2].any() and np.isposinf(again[1][:, 2]).all()
    clean = tuple(jnp.ones_like(x).at[:, 2].set(0) for x in outs)
    dirty = tuple(x.at[:, 2].set(jnp.nan) for x in clean)
    wanted = _backward((q, k, v, mask), outs, clean, False)
    got = _backward(operands, again, dirty, False)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_leaves_follow_the_equations(causal):
    q, k, v = _draw(7, 9)
    mask = _mask("full", 4, 7, 9)
    seen = visible(7, 9, causal, mask, heads=4)
    settings = dict(LAYOUT, scale=0.5, is_causal=causal)
    extras = Extras(mask=mask)
    outs = attention_plain(q, k, v, extras, name=NAMES[causal], **settings)
    for got, wanted in zip(outs, attend(q, k, v, seen, 0.5)[:3], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    d_out = jnp.cos(outs[0])
    rows = (*outs, d_out, None, None)
    settings |= dict(name="BackwardsAttention")
    grads = attention_bwd_plain(q, k, v, extras, *rows, **settings)
    for got, wanted in zip(grads, gradients(q, k, v, seen, d_out, 0.5), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (128, 256), (256, 128), (384, 256)])
def test_the_tiled_leaf_contracts_over_partitions_and_chunks(lengths, causal):
    q, k, v = _draw(*lengths)

    def tile(x):  # the second axis on the partitions, as MemrefTile lays it out
        rows = jnp.moveaxis(x, 1, 0)
        count = min(rows.shape[0], 128)
        return rows.reshape(count, -1, *rows.shape[1:])

    operands = tile(q.mT), tile(k.mT), tile(v)
    run = functools.partial(
        attention_tiled_fwd,
        name="TiledNativeKernelAttention",
        scale=0.5,
        is_causal=causal,
    )
    seen = visible(*lengths, causal, heads=4)
    for got, wanted in zip(
        jax.jit(run)(*operands), attend(q, k, v, seen, 0.5)[:3], strict=True
    ):
        np.testing.assert_allclose(got, tile(wanted), rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("window", "most"), [(0, 64), (1, 1), (128, 2), (256, 2), (1024, 5)]
)
def test_a_block_of_rows_visits_the_blocks_of_its_window_alone(window, most):
    """16384 positions in blocks of 256: a window costs the window."""
    rows = cut_rows(16384, 256)
    array = jnp.zeros((1, 16384, 1))
    options = Options(True, window=window)
    (segment,) = make_segments(rows, array, array, Extras(), options, 256, True)

    def visited(i):
        return visit(segment, i, lambda j, n, seen: n + 1, 0, static=False)

    counts = jax.lax.map(visited, jnp.arange(rows.blocks, dtype=jnp.int32))
    assert counts.max() == most and counts[0] == 1


@pytest.mark.parametrize("causal", [False, True])
def test_no_temporary_has_both_sequence_lengths(causal):
    """At sequence 8192 all scores of one head would be 256 MiB."""
    seq, d = 8192, 16
    row = jax.ShapeDtypeStruct((1, seq, d), "float32")
    column = jax.ShapeDtypeStruct((1, seq, 1), "float32")

    def forward(q, k, v):
        return _forward(q, k, v, None, causal, block=256)

    def backward(q, k, v, out, neg_max, recip, d_out, d_neg_max, d_recip):
        cotangents = d_out, d_neg_max, d_recip
        outs = out, neg_max, recip
        return _backward((q, k, v, None), outs, cotangents, causal, block=256)

    rows = (row, row, row)
    statistics = (row, column, column)
    for run, shapes in ((forward, rows), (backward, rows + statistics + statistics)):
        compiled = jax.jit(run).lower(*shapes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 16 << 20
