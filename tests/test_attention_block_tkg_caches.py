"""What the decode block writes, reads and never touches in its caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_block_case import (
    BLOCKS,
    call,
    combination,
    operands,
    reference,
    sizes,
)
from tests.attention_block_loss import loss, split
from tests.macro_case import error


def run(arrays, options):
    return jax.jit(lambda arrays: call(arrays, options))(arrays)


def hidden_slots(arrays):
    """Which cache slots no query sees, `[..., slots]` of the caches' own layout."""
    mask = np.asarray(arrays["attention_mask"])
    seq = arrays["X"].shape[1]
    seen = np.asarray(mask[: len(mask) - seq].any((2, 3))).T
    shape = arrays["V_cache"].shape
    hidden = np.ones((shape[0], shape[-2]), bool)
    if "active_blocks_table" not in arrays:
        hidden[:, : seen.shape[1]] = ~seen
        return hidden
    for b, blocks in enumerate(np.asarray(arrays["active_blocks_table"])):
        for slot in np.flatnonzero(seen[b]):
            hidden[blocks[slot // shape[1]], slot % shape[1]] = False
    return hidden


def poisoned(arrays, value):
    """The arrays with `value` in every slot that no query sees."""
    hidden, found = hidden_slots(arrays), dict(arrays)
    assert hidden.any() and not hidden.all()
    for name in ("K_cache", "V_cache"):
        cache = np.array(arrays[name])
        rows = cache[:, 0] if cache.ndim == 4 else cache
        turned = rows.shape[1:] != (hidden.shape[1], rows.shape[2])
        (rows.swapaxes(1, 2) if turned else rows)[hidden] = value
        found[name] = jnp.asarray(cache)
    return found


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["every norm", "keys transposed", "blocks", "new tokens alone"]
)
def test_hidden_slots_reach_no_output_and_no_gradient(name, value):
    arrays, options = combination(name)
    if name == "new tokens alone":
        bad = arrays | {
            k: jnp.full_like(arrays[k], value) for k in ("K_cache", "V_cache")
        }
    else:
        bad = poisoned(arrays, value)
    options = options | dict(update_cache=False)
    np.testing.assert_array_equal(run(bad, options)[0], run(arrays, options)[0])
    got, wanted = (
        jax.jit(jax.grad(loss(options, split(a)[1])))(split(a)[0])
        for a in (bad, arrays)
    )
    for key in wanted:
        assert np.isfinite(got[key]).all(), key
        assert error(got[key], wanted[key]) <= 1e-6, key


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks"])
def test_hidden_fp8_slots_reach_no_output(name):
    arrays, options = combination(name)
    bad = poisoned(arrays, np.nan)
    for a, b in zip(run(bad, options)[:1], run(arrays, options)[:1], strict=True):
        np.testing.assert_array_equal(a, b)


# Bits of NaNs, quiet and signalling, with payloads.
PATTERNS = {
    "float8_e4m3": [0x7F, 0xFF, 0x79],
    "float16": [0x7D01, 0xFC03, 0x7E55],
    "bfloat16": [0x7F81, 0xFFA3, 0x7FC5],
    "float32": [0x7FC01234, 0xFFC00001, 0x7FA00001],
}


def bits_of(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def named_slots(arrays):
    """Which slots the update names, `[..., slots]` of the values' cache."""
    shape, seq = arrays["V_cache"].shape, arrays["X"].shape[1]
    named = np.zeros((shape[0], shape[-2]), bool)
    for b, start in enumerate(np.asarray(arrays["kv_cache_update_idx"])[:, 0]):
        row = named.reshape(-1) if "active_blocks_table" in arrays else named[b]
        row[start : start + seq] = True
    return named


def slots_first(cache, options, key):
    """A cache as `[..., slots, width]`, without an axis for its head."""
    cache = cache[:, 0] if cache.ndim == 4 else cache
    turned = key == "K_cache" and options.get("K_cache_transposed")
    return cache.swapaxes(1, 2) if turned else cache


@pytest.mark.parametrize("dtype", PATTERNS)
@pytest.mark.parametrize("name", ["bare", "keys transposed", "blocks", "one sequence"])
def test_only_the_named_slots_are_touched(name, dtype):
    """Bit by bit, a NaN's payload too; the named ones hold the new tokens."""
    if name == "one sequence":
        options, arrays = {}, operands(sizes(batch=1), {})
    else:
        arrays, options = combination(name)
    for seed, key in enumerate(("K_cache", "V_cache")):
        shape, kind = arrays[key].shape, jnp.dtype(dtype)
        noise = np.random.default_rng(seed).choice(PATTERNS[dtype], shape)
        noise = noise.astype(f"uint{8 * kind.itemsize}")
        arrays[key] = jnp.asarray(noise.view(kind))
    seq = arrays["X"].shape[1]
    arrays["attention_mask"] = arrays["attention_mask"].at[:-seq].set(0)
    if dtype == "float8_e4m3":
        options = options | dict(fp8=True)
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jnp.ones((1, 1)))
    got, wanted = run(arrays, options)[1:], reference(arrays, options)[1:]
    named = named_slots(arrays)
    assert named.any() and not named.all()
    for key, out, exact in zip(("K_cache", "V_cache"), got, wanted, strict=True):
        assert out.dtype == arrays[key].dtype and out.shape == arrays[key].shape
        before, after, exact = (
            slots_first(np.asarray(x), options, key) for x in (arrays[key], out, exact)
        )
        np.testing.assert_array_equal(bits_of(before)[~named], bits_of(after)[~named])
        written = after[named].astype(np.float32), exact[named].astype(np.float32)
        step = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(*written, rtol=max(step, 1e-5), atol=1e-5)


SKIPS = [np.uint32(0xFFFFFFFF), np.int32(-1), np.int8(-1)]


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_an_index_that_says_no_write_writes_nothing(skip, blocks, known):
    arrays = operands(BLOCKS if blocks else sizes(), {})
    index = np.array(arrays["kv_cache_update_idx"]).astype(skip.dtype)
    index[0] = skip
    arrays["kv_cache_update_idx"] = jnp.asarray(index)
    outs = call(arrays, {}) if known else run(arrays, {})
    signed = dict(arrays, kv_cache_update_idx=index.astype(np.int64))
    for out, exact in zip(outs[1:], reference(signed, {})[1:], strict=True):
        assert error(out, exact) <= 1e-6
    if not blocks:
        np.testing.assert_array_equal(outs[1][0], arrays["K_cache"][0])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(
    ("start", "dtype"), [(8, "uint32"), (31, "int32"), (40, "int8")]
)
def test_a_write_that_does_not_fit_is_refused_or_left_out(blocks, start, dtype):
    """R-15: a write of 2 tokens at the last slot, and past the end."""
    n = sizes(slots=8, visible=8, block=4) if blocks else sizes()
    start = start + 23 if blocks and start == 8 else start
    arrays = operands(n, {})
    index = np.array(arrays["kv_cache_update_idx"]).astype(dtype)
    index[1] = start
    arrays["kv_cache_update_idx"] = jnp.asarray(index)
    with pytest.raises(ValueError, match=f"room for S = 2 tokens .* got {start}"):
        call(arrays, {})
    outs = run(arrays, {})
    for out, exact in zip(outs[1:], reference(arrays, {})[1:], strict=True):
        assert error(out, exact) <= 1e-6


def test_more_tokens_than_slots_are_written_nowhere():
    arrays = operands(sizes(seq=3, slots=6, visible=3, block=1), {})
    cache = arrays["K_cache"][:2]
    arrays |= dict(K_cache=cache, V_cache=cache + 1)
    arrays["active_blocks_table"] = jnp.zeros((2, 3), jnp.uint32)
    arrays["kv_cache_update_idx"] = jnp.zeros((2, 1), jnp.uint32)
    _, k_out, v_out = run(arrays, {})
    np.testing.assert_array_equal(k_out, cache)
    np.testing.assert_array_equal(v_out, cache + 1)
    live, rest = split(arrays)
    grads = jax.jit(lambda live, rest: jax.grad(loss({}, rest))(live))(live, rest)
    assert all(np.isfinite(g).all() for g in grads.values())


def test_of_two_sequences_that_name_one_slot_the_later_counts():
    """Their gradients go to who wrote."""
    arrays = operands(sizes(slots=8, visible=8, block=4), {})
    arrays["kv_cache_update_idx"] = jnp.array([[5], [6]], jnp.uint32)
    outs = run(arrays, {})
    for out, exact in zip(outs, reference(arrays, {}), strict=True):
        assert error(out, exact) <= 5e-6

    def value(x):
        return call(dict(arrays, X=x), {})[2].reshape(-1, 4)[5:8].sum()

    dx = jax.grad(value)(arrays["X"])
    columns = arrays["W_qkv"][:, -4:].sum(1)
    wanted = np.stack([[columns, columns * 0], [columns, columns]])
    assert error(dx, wanted) <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["bare", "keys transposed", "blocks", "fp8"])
def test_donated_caches_are_updated_in_place(name, dtype):
    arrays, options = combination(name, dtype)
    caches = {k: jnp.array(arrays.pop(k)) for k in ("K_cache", "V_cache")}
    wanted = call(arrays | caches, options)
    step = jax.jit(lambda c, a: call(a | c, options)[1:], donate_argnums=0)
    compiled = step.lower(caches, arrays).compile()
    saved = compiled.memory_analysis().alias_size_in_bytes
    assert saved >= sum(x.nbytes for x in caches.values())
    got = step(caches, arrays)
    assert all(x.is_deleted() for x in caches.values())
    for a, b in zip(got, wanted[1:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("blocks", "dtype"),
    [
        (False, "float32"),
        (False, "bfloat16"),
        (False, "float8_e4m3"),
        (True, "float32"),
    ],
)
def test_a_step_copies_no_donated_cache(blocks, dtype):
    """Its temporary memory is less than either of the caches."""
    n = sizes(seq=1, width=16, slots=8192, visible=32)
    n = n | dict(slots=512, block=16) if blocks else n
    arrays = operands(n, {})
    caches = {k: arrays.pop(k).astype(dtype) for k in ("K_cache", "V_cache")}
    if dtype == "float8_e4m3":
        arrays |= dict.fromkeys(("k_scale", "v_scale"), jnp.ones((1, 1)))
    step = jax.jit(lambda c, a: call(a | c, {}), donate_argnums=0)
    memory = step.lower(caches, arrays).compile().memory_analysis()
    size = sum(x.nbytes for x in caches.values())
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 3


def test_blocks_that_no_table_lists_and_entries_that_are_none():
    """A table's filler names no block: its slots are never seen, nor read."""
    arrays, options = combination("blocks")
    mask = np.array(arrays["attention_mask"])
    mask[:4] = 1
    arrays["attention_mask"] = jnp.asarray(mask)
    table = np.array(arrays["active_blocks_table"])
    table[:, 0] = 0xFFFFFFFF
    got = run(dict(arrays, active_blocks_table=jnp.asarray(table)), options)[0]
    mask[:4] = 0
    hidden = dict(arrays, attention_mask=jnp.asarray(mask))
    assert error(got, reference(hidden, options)[0]) <= 5e-6


def test_columns_beyond_the_hidden_ones_enter_every_sum():
    """They hold zeros by contract: what is not finite there is not hidden."""
    arrays, options = combination("hidden_actual")
    bad = dict(arrays, X=arrays["X"].at[0, 0, -1].set(jnp.nan))
    got, wanted = run(bad, options)[0], run(arrays, options)[0]
    seq = arrays["X"].shape[1]
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[seq:], wanted[seq:])
