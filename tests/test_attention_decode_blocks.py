"""Decode attention over block caches: tables, shared and missing blocks, writes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import nn
from neuronjax.emit import attention_tkg_fwd_kernel
from tests.decode_case import (
    attend,
    draw,
    gradients,
    into_blocks,
    require_as_good_as_plain,
    visible,
)

# batch, query heads, key heads, new tokens, slots, width of keys, width of values
SHAPE = (2, 4, 2, 2, 6, 4, 3)
TABLE = np.array([[4, 1, 2], [3, 0, 6]])  # block 5 is nobody's
LENGTHS, STARTS = np.array([5, 3]), np.array([[1, 2], [4, 5]])


def _case(shape=SHAPE, table=TABLE, num_blocks=7, fill=0.0, dtype=jnp.float32):
    """Flat arrays, the same with block caches, and a sink."""
    *flat, sink = draw(shape, dtype)
    caches = [into_blocks(x, table, num_blocks, fill) for x in flat[3:]]
    return flat, [*flat[:3], *caches], sink


def _options(window=True, table=TABLE, **more):
    options = dict(lengths=jnp.asarray(LENGTHS, jnp.int32), tp_k_prior=True)
    options |= dict(active_blocks_table=jnp.asarray(table, jnp.int32))
    if window:
        options["start_pos_ids"] = jnp.asarray(STARTS, jnp.int32)
    return options | more


def _seen(window=True) -> np.ndarray:
    return visible(LENGTHS, STARTS if window else None, 2, 6)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_values_and_gradients_are_those_of_the_equations(window, sunk):
    flat, blocks, sink = _case()
    weight = np.cos(np.arange(2 * 4 * 3 * 2)).reshape(2, 4, 3, 2).astype("float32")

    def loss(sink, *arrays):
        extra = dict(sink=sink) if sunk else {}
        out = attention_tkg_fwd_kernel(*arrays, **extra, **_options(window))
        return (out * weight).sum(), out

    run = jax.jit(jax.grad(loss, range(6), has_aux=True))
    (d_sink, *grads), out = run(sink, *blocks)
    used, seen = sink if sunk else None, _seen(window)
    np.testing.assert_allclose(out, attend(flat, seen, used), rtol=1e-5, atol=1e-6)
    *wanted, wanted_sink = gradients(flat, seen, used, weight)
    wanted[3:] = (into_blocks(x, TABLE, 7) for x in wanted[3:])
    for got, exact in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(d_sink, wanted_sink if sunk else 0, rtol=1e-4, atol=1e-6)


def test_derivatives_of_both_orders_with_every_option():
    shape = (2, 2, 1, 2, 4, 2, 2)
    table = np.array([[2, 0], [3, 1]])
    with jax.enable_x64(True):
        _, blocks, sink = _case(shape, table, 5, dtype=jnp.float64)

        def out(sink, *arrays):
            return attention_tkg_fwd_kernel(
                *arrays,
                sink=sink,
                lengths=jnp.array([3, 1]),
                start_pos_ids=jnp.array([[1, 2], [3, 0]]),
                active_blocks_table=jnp.asarray(table),
                tp_k_prior=True,
            )

        check_grads(jax.jit(out), (sink, *blocks), 2, modes=["fwd", "rev"])


def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation():
    """In values and in every gradient."""
    flat, _, sink = _case(dtype=jnp.bfloat16)

    def blocks(cache):
        pieces = cache.reshape(2, 2, 3, 2, cache.shape[3])
        empty = jnp.zeros((7, 2, 2, cache.shape[3]), cache.dtype)
        return empty.at[TABLE].set(jnp.swapaxes(pieces, 1, 2))

    def run(q, k_new, v_new, k_old, v_old, sink):
        cached = (q, k_new, v_new, blocks(k_old), blocks(v_old))
        return attention_tkg_fwd_kernel(*cached, sink=sink, **_options())

    require_as_good_as_plain(run, flat, _seen(), sink)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("masked", [False, True])
def test_unlisted_blocks_and_unseen_slots_change_nothing(masked, poison):
    """R-08: in values and gradients; an entry that is no block is unseen too."""
    table = TABLE.copy()
    table[0, 2], table[1, 2] = -1, 7
    flat, clean, sink = _case(table=table)
    seen = _seen()
    seen[:, :, 4:6] = False
    hidden = ~seen[:, :, :6].any(1)
    spoilt = [np.where(hidden[:, None, :, None], poison, x) for x in flat[3:]]
    bad = [into_blocks(x, table, 7, poison) for x in spoilt]
    options = _options(table=table)
    if masked:
        mask = np.moveaxis(seen, 2, 0)[:, :, None].copy()
        mask[4:6] = True  # the table says that there is nothing
        mask = jnp.asarray(np.broadcast_to(mask, (8, 2, 4, 2)))
        options = dict(mask=mask, tp_k_prior=True)
        options |= dict(active_blocks_table=jnp.asarray(table, jnp.int32))
    table = options.pop("active_blocks_table")

    def loss(table, sink, *arrays):
        out = attention_tkg_fwd_kernel(
            *arrays, sink=sink, active_blocks_table=table, **options
        )
        return jnp.sin(out).sum(), out

    run = jax.jit(jax.value_and_grad(loss, range(1, 7), has_aux=True))
    (_, out), grads = run(table, sink, *clean[:3], *bad)
    (_, same), wanted = run(table, sink, *clean)
    np.testing.assert_allclose(out, attend(flat, seen, sink), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, same, rtol=1e-6)
    chex.assert_trees_all_close(grads, wanted, atol=1e-6)
    for grad in grads[4:]:
        listed = np.unique(np.asarray(table)[:, :2])
        assert not np.any(np.delete(np.asarray(grad), listed, 0))


@pytest.mark.parametrize("entry", [7, 2**31 - 1, -2, -7])
def test_an_entry_outside_is_refused_and_under_jit_no_block(entry):
    """Never the nearest block, nor one from the end."""
    table = TABLE.copy()
    table[0, 1] = entry
    flat, blocks, _ = _case()
    refused = rf"must hold blocks in \[0, 7\), or -1 for none, got {entry}"
    with pytest.raises(ValueError, match=refused):
        attention_tkg_fwd_kernel(*blocks, **_options(table=table))

    def out(table):
        options = _options(window=False) | dict(active_blocks_table=table)
        return attention_tkg_fwd_kernel(*blocks, **options)

    seen = _seen(window=False)
    seen[0, :, 2:4] = False
    got = jax.jit(out)(jnp.asarray(table, jnp.int32))
    np.testing.assert_allclose(got, attend(flat, seen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_tables_of_any_dtype_and_none_as_minus_one(dtype):
    """In an unsigned dtype -1 is the largest number; 2**32 is not block 0."""
    flat, blocks, _ = _case()
    table = TABLE.astype(dtype)
    table[1, 1] = np.iinfo(dtype).max if dtype[0] == "u" else -1
    seen = _seen(window=False)
    seen[1, :, 2:4] = False
    with jax.enable_x64(dtype == "int64"):
        options = _options(window=False) | dict(active_blocks_table=jnp.asarray(table))
        got = attention_tkg_fwd_kernel(*blocks, **options)
        np.testing.assert_allclose(got, attend(flat, seen), rtol=1e-4, atol=1e-5)
        if dtype == "int64":
            run = jax.jit(
                lambda table: attention_tkg_fwd_kernel(
                    *blocks, **options | dict(active_blocks_table=table)
                )
            )
            table[1, 1] = 2**32
            np.testing.assert_allclose(run(jnp.asarray(table)), got, rtol=1e-5)


def test_a_shared_block_gets_the_sum_of_its_gradients():
    table, shape = np.array([[2, 0], [2, 1]]), (2, 2, 1, 1, 4, 3, 3)
    *flat, _ = draw(shape)
    for x in (3, 4):  # both sequences begin alike
        flat[x] = flat[x].at[1, :, :2].set(flat[x][0, :, :2])
    blocks = [*flat[:3], *(into_blocks(x, table, 3) for x in flat[3:])]

    def loss(*arrays):
        return attention_tkg_fwd_kernel(
            *arrays,
            lengths=jnp.array([4, 3]),
            active_blocks_table=jnp.asarray(table),
            tp_k_prior=True,
        ).sum()

    grads = jax.grad(loss, (3, 4))(*blocks)
    seen = visible([4, 3], None, 1, 4)
    wanted = gradients(flat, seen, None, np.ones((2, 2, 3, 1)))[3:5]
    for got, exact in zip(grads, wanted, strict=True):
        both = exact[0, :, :2] + exact[1, :, :2]
        np.testing.assert_allclose(got[2], both, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got[0], exact[0, :, 2:], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got[1], exact[1, :, 2:], rtol=1e-4, atol=1e-6)


def test_a_ragged_batch_may_have_an_empty_row_and_a_missing_block():
    """R-16: lengths [0, 1, 4] give [0, 1, 3], traced, in one compilation."""
    chex.clear_trace_counter()
    values = jnp.array([1.0, 2, 3, 6]).reshape(2, 1, 2, 1)
    zero, table = jnp.zeros((3, 1, 1, 1)), jnp.array([[-1, -1], [0, -1], [0, 1]])

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(lengths, table):
        return attention_tkg_fwd_kernel(
            *(zero, None, None, jnp.zeros_like(values), values),
            lengths=lengths,
            active_blocks_table=table,
            tp_k_prior=True,
        ).ravel()

    np.testing.assert_allclose(step(jnp.array([0, 1, 4]), table), [0, 1, 3])
    np.testing.assert_allclose(step(jnp.array([0, 2, 3]), table), [0, 1.5, 2])
    np.testing.assert_allclose(step(jnp.array([4, 4, 4]), table), [0, 1.5, 3])


def test_only_the_used_part_of_the_listed_blocks_is_read():
    """R-17: used length 2 of 4 slots, one new token of value 6, gives 3."""
    values = jnp.array([jnp.nan, jnp.nan, 1, 2]).reshape(2, 1, 2, 1)
    new, zero = jnp.full((1, 1, 1, 1), 6.0), jnp.zeros((1, 1, 1, 1))
    step = jax.jit(
        lambda used: attention_tkg_fwd_kernel(
            *(zero, zero, new, jnp.zeros_like(values), values),
            lengths=used,
            active_blocks_table=jnp.array([[1, 0]]),
            tp_k_prior=True,
        ).ravel()
    )
    np.testing.assert_allclose(step(jnp.array([2])), [3.0])
    np.testing.assert_allclose(step(jnp.array([0])), [6.0])
    both = jax.vmap(step)(jnp.array([[2], [0]]))
    np.testing.assert_allclose(both.ravel(), [3.0, 6.0])


@pytest.mark.parametrize("seq", [1, 2])
@pytest.mark.parametrize("width", [3, 20])
def test_decode_over_a_block_cache_equals_the_prefill(width, seq):
    """R-14: two sequences grow through their own blocks; a write crosses blocks."""
    total, heads, kv_heads = 8, 4, 2
    rng = np.random.default_rng(0)
    draws = [(heads, 2), (kv_heads, 2), (kv_heads, 3)]
    arrays = [rng.normal(size=(2, n, total, d)).astype("float32") for n, d in draws]
    sink = jnp.asarray(rng.normal(size=(heads, 1)), jnp.float32)
    back = np.arange(total)[:, None] - np.arange(total)
    band = np.broadcast_to((back >= 0) & (back < width), (2, total, total))
    nothing = [np.zeros((2, kv_heads, 0, d)) for d in (2, 3)]
    wanted = attend([*arrays, *nothing], band, sink)
    table = jnp.array([[5, 0, 3], [1, 4, 2]])

    @jax.jit
    def step(caches, first):
        new = [jax.lax.dynamic_slice_in_dim(x, first, seq, 2) for x in arrays]
        where = jnp.full((2,), first)
        starts = jnp.maximum(0, where[:, None] + jnp.arange(seq) - width + 1)
        out = attention_tkg_fwd_kernel(
            *(*new, *caches),
            lengths=where,
            start_pos_ids=starts,
            sink=sink,
            active_blocks_table=table,
            tp_k_prior=True,
        )
        pairs = zip(caches, new[1:], strict=True)
        return out, [nn.write_block_cache(c, x, where, table) for c, x in pairs]

    caches = [jnp.full((6, kv_heads, 3, d), jnp.nan) for d in (2, 3)]
    for first in range(0, total, seq):
        out, caches = step(caches, jnp.int32(first))
        rows = wanted[..., first : first + seq]
        np.testing.assert_allclose(out, rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tree", [None, np.array([[1, 0], [0, 1]], bool)])
@pytest.mark.parametrize("window", [False, True])
def test_position_ids_over_blocks_in_the_chips_layouts(window, tree):
    """The last slots stand for the new tokens: what the cache has there is not read."""
    flat, _, sink = _case((2, 3, 1, 2, 6, 4, 4))
    flat[3:] = (x.at[:, :, 4:].set(jnp.nan) for x in flat[3:])
    caches = [into_blocks(x, TABLE, 7, np.nan)[:, 0] for x in flat[3:]]
    positions, starts = np.array([[4, 5], [2, 3]]), np.array([[1, 4], [0, 3]])
    config = neuronjax.AttnTKGConfig(
        *(2, 3, 2, 6, 100, 4, 2), tp_k_prior=True, use_pos_id=True, qk_in_sb=True
    )
    q, k, v = flat[:3]
    mask = None
    if tree is not None:
        mask = jnp.broadcast_to(jnp.asarray(tree.T)[:, None, None], (2, 2, 3, 2))
    out, k_out = neuronjax.attention_tkg(
        *(jnp.moveaxis(x, -1, 0).reshape(4, -1) for x in (q, k)),
        *(v, *caches, mask, config),
        rope_pos_ids=jnp.asarray(positions),
        start_pos_ids=jnp.asarray(starts) if window else None,
        sink=sink,
        active_blocks_table=jnp.asarray(TABLE, jnp.uint32),
    )
    read = [*flat[:3], *(x[:, :, :4] for x in flat[3:])]
    # The second window of sequence 0 ends where it starts, that of sequence 1 begins
    # at its second new token.
    starts = np.minimum(starts, positions[:, :1]) if window else None
    wanted = attend(read, visible(positions[:, 0], starts, 2, 4, tree), sink)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
    assert k_out is None


def test_fp8_blocks_are_constants():
    flat, blocks, sink = _case()
    codes = [(4 * x).astype(jnp.float8_e4m3) for x in blocks[1:]]
    wide = [flat[0], *((4 * x).astype(jnp.float8_e4m3) for x in flat[1:])]

    def out(q, sink):
        return attention_tkg_fwd_kernel(q, *codes, sink=sink, **_options())

    got, pull = jax.vjp(jax.jit(out), blocks[0], sink)
    with neuronjax.plain():
        np.testing.assert_allclose(out(blocks[0], sink), got, rtol=1e-5, atol=1e-5)
    wide = [np.asarray(x, "float32") for x in wide]
    exact = attend(wide, _seen(), sink)
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-4)
    wanted = gradients(wide, _seen(), sink, np.ones(got.shape))
    dq, d_sink = pull(jnp.ones_like(got))
    np.testing.assert_allclose(dq, wanted[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(d_sink, wanted[5], rtol=1e-3, atol=1e-4)


def _sizes(jaxpr):
    """The size of every array that a program makes, calls and branches included."""
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        inner = [getattr(x, "jaxpr", x) for x in inner]
        inner = [x for x in inner if hasattr(x, "eqns")]
        for one in inner:
            yield from _sizes(one)
        if not inner:
            yield from (v.aval.size for v in equation.outvars)


@pytest.mark.parametrize("blocks", [False, True])
def test_no_key_is_repeated_and_no_more_gathered_than_the_slots_in_use(blocks):
    """Eight query heads share one key head; the cache has many more slots."""
    slots, d = 64, 16
    q, new = jnp.zeros((2, 8, 1, d)), jnp.zeros((2, 1, 1, d))
    cache = jnp.zeros((400, 1, 16, d)) if blocks else jnp.zeros((2, 1, 3200, d))
    options = dict(lengths=jnp.array([3, 50]), prior_slots=slots, tp_k_prior=True)
    if blocks:
        options |= dict(active_blocks_table=jnp.zeros((2, 200), jnp.int32))
    attend = functools.partial(attention_tkg_fwd_kernel, **options)
    family = neuronjax.trace(attend, q, new, new, cache, cache)
    assert [row.name for row in family.rows] == ["AttentionTkgFwd"]
    jaxpr = jax.make_jaxpr(lambda *a: _leaf(a, options, slots))(q, new, new, cache)
    # The scores of 8 heads are as many as half the keys.
    assert max(_sizes(jaxpr.jaxpr)) <= 2 * slots * d


def _leaf(arrays, options, slots):
    from neuronjax.kernels.attention.decode import attention_decode_fwd

    q, new, value, cache = arrays
    table = options.get("active_blocks_table")
    return attention_decode_fwd(
        *(q, new, value, cache, cache, None, options["lengths"], None, None),
        *(None, None, table),
        name="AttentionTkgFwd",
        prior_slots=slots,
        tp_k_prior=True,
        fuse_rope=False,
    )
