"""Writes into circular and block caches: their own slots, no other, in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from neuronjax import nn

DTYPES = ["float32", "bfloat16", "float8_e4m3"]


def _bits(x):
    width = {1: "uint8", 2: "uint16", 4: "uint32"}[x.dtype.itemsize]
    return np.asarray(jax.lax.bitcast_convert_type(x, jnp.dtype(width)))


def _filled(shape, dtype):
    """Any bits, those of NaN among them."""
    dtype = jnp.dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return jnp.asarray(raw.view(dtype)[..., 0])


def _new(shape, dtype):
    values = np.random.default_rng(1).normal(size=shape) * 4
    return jnp.asarray(values, jnp.float32).astype(dtype)


def _around(cache, new, position, axis):
    """The written cache, one token after the other."""
    held = np.moveaxis(np.array(cache), axis, 1)
    tokens = np.moveaxis(np.asarray(new), axis, 1)
    for b in range(len(held)):
        for t in range(tokens.shape[1]):
            if position[b] >= 0:
                held[b, (position[b] + t) % held.shape[1]] = tokens[b, t]
    return np.moveaxis(held, 1, axis)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 5, 12])
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_a_circular_cache_keeps_the_last_tokens(axis, count, dtype):
    """R-15: the slots that no token goes to keep their bits."""
    shape = [3, 2, 2, 2]
    shape[axis] = 5
    cache = _filled(shape, dtype)
    shape[axis] = count
    new, position = _new(shape, dtype), [0, 4, 13]
    write = functools.partial(nn.write_circular_cache, axis=axis)
    for run in (write, jax.jit(write)):
        got = run(cache, new, jnp.asarray(position))
        wanted = _around(_bits(cache), _bits(new), position, axis)
        np.testing.assert_array_equal(_bits(got), wanted)


def test_a_negative_position_is_refused_or_dropped():
    """R-15: under jit that row comes back as it was."""
    cache, new = jnp.zeros((2, 4, 1)), jnp.ones((2, 1, 1))
    position = jnp.array([-1, 5])
    with pytest.raises(ValueError, match="position must be at least 0, got"):
        nn.write_circular_cache(cache, new, position)
    got = jax.jit(nn.write_circular_cache)(cache, new, position)
    np.testing.assert_array_equal(got[..., 0], [[0, 0, 0, 0], [0, 1, 0, 0]])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_positions_of_any_dtype_keep_their_slot(dtype):
    with jax.enable_x64(dtype == "int64"):
        first = {"int8": 100, "uint8": 200, "uint32": 2**32 - 2, "int64": 2**40 + 3}
        cache = jnp.zeros((1, 300, 1), jnp.float32)
        new, position = jnp.ones((1, 1, 1), jnp.float32), first[dtype]
        got = jax.jit(nn.write_circular_cache)(cache, new, jnp.array([position], dtype))
        np.testing.assert_array_equal(np.flatnonzero(got), [position % 300])


TABLE = np.array([[3, 1, 0], [2, 4, -1]])


def _blocks(cache, new, position, table):
    """The written cache, one token after the other; rows that do not fit write none."""
    held, tokens = np.array(cache), np.asarray(new)
    length, count = held.shape[-2], tokens.shape[-2]
    for b in range(len(tokens)):
        slots = [position[b] + t for t in range(count)]
        if min(slots) < 0 or max(slots) >= length * table.shape[1]:
            continue
        entries = [table[b, s // length] for s in slots]
        if min(entries) < 0 or max(entries) >= len(held):
            continue
        for t, (slot, block) in enumerate(zip(slots, entries, strict=True)):
            held[block, ..., slot % length, :] = tokens[b, ..., t, :]
    return held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("position", [(0, 0), (3, 6), (9, 4), (10, -1), (11, 7)])
def test_a_block_cache_is_written_where_its_table_says(position, heads, dtype):
    """R-15: a write crosses blocks within its row, or writes nothing."""
    cache = _filled((5, *heads, 4, 2), dtype)
    new = _new((2, *heads, 2, 2), dtype)
    write = jax.jit(nn.write_block_cache)
    got = write(cache, new, jnp.asarray(position), jnp.asarray(TABLE))
    wanted = _blocks(_bits(cache), _bits(new), position, TABLE)
    np.testing.assert_array_equal(_bits(got), wanted)
    if max(position) < 6 and min(position) >= 0:
        same = nn.write_block_cache(
            cache, new, jnp.asarray(position), jnp.asarray(TABLE)
        )
        np.testing.assert_array_equal(_bits(same), wanted)


@pytest.mark.parametrize("entry", [5, -1, 2**31 - 1])
@pytest.mark.parametrize("position", [3, 11, -1, 2**31 - 1])
def test_a_write_that_does_not_fit_is_refused_where_it_is_known(position, entry):
    """R-15: past the row of the table, or into an entry that is no block."""
    cache, new = jnp.zeros((5, 4, 1)), jnp.ones((1, 2, 1))
    table = jnp.array([[0, entry, 1]], jnp.int32)
    with pytest.raises(ValueError, match="write_block_cache: 2 slots from position"):
        nn.write_block_cache(cache, new, jnp.array([position]), table)
    got = jax.jit(nn.write_block_cache)(cache, new, jnp.array([position]), table)
    assert not np.any(got)


def test_two_sequences_that_write_one_slot_are_refused():
    cache, new = jnp.zeros((5, 4, 1)), jnp.ones((2, 2, 1))
    with pytest.raises(ValueError, match="must write slots of their own"):
        nn.write_block_cache(cache, new, jnp.array([1, 2]), jnp.array([[1], [1]]))
    nn.write_block_cache(cache, new, jnp.array([0, 2]), jnp.array([[1], [1]]))


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_a_wide_table_entry_is_no_block(dtype):
    with jax.enable_x64(dtype == "int64"):
        none = 2**32 - 1 if dtype == "uint32" else 2**32
        cache, new = jnp.zeros((2, 4, 1), jnp.float32), jnp.ones((1, 1, 1), jnp.float32)
        write = jax.jit(nn.write_block_cache)
        for entry, written in ((none, False), (0, True)):
            table = jnp.array([[entry]], dtype)
            got = write(cache, new, jnp.array([1], jnp.int32), table)
            assert np.any(got) == written


def test_shapes_that_do_not_fit_are_refused():
    cache, new, table = jnp.zeros((5, 4, 2)), jnp.ones((1, 1, 3)), jnp.zeros((1, 1))
    with pytest.raises(ValueError, match="write_block_cache: new, position and"):
        nn.write_block_cache(cache, new, jnp.zeros(1, "int32"), table.astype("int32"))
    with pytest.raises(ValueError, match="write_circular_cache: new and position"):
        nn.write_circular_cache(cache, jnp.zeros((5, 1, 3)), jnp.zeros(5, "int32"))


def test_wider_values_are_clipped_before_they_are_fp8():
    cache = jnp.zeros((1, 4, 1), jnp.float8_e4m3)
    new, at = jnp.array([[[1000.0], [-300.0]]]), jnp.array([0])
    block = nn.write_block_cache(cache, new, at, jnp.array([[0]]))
    for got in (
        nn.write_circular_cache(cache, new, at),
        nn.write_cache(cache, new, at),
        block,
    ):
        np.testing.assert_array_equal(np.float32(got[0, :2, 0]), [240.0, -240.0])


@pytest.mark.parametrize("dtype", [*DTYPES, "float16"])
@pytest.mark.parametrize("name", ["write", "circular", "transposed", "block", "heads"])
def test_a_donated_cache_is_updated_in_place(name, dtype):
    """No copy of it is made, in its own dtype or in a wider one; no other bit moves."""
    shape, axis = [6, 2, 64, 32], 2
    if name == "transposed":
        shape, axis = [6, 2, 32, 64], 3
    if name == "block":
        shape, axis = [6, 64, 32], 1
    cache = _filled(shape, dtype)
    shape[axis] = 3
    new, position = _new(shape, dtype), jnp.arange(6)
    if name in ("block", "heads"):
        write = functools.partial(nn.write_block_cache, position=position)
        write = functools.partial(write, active_blocks_table=jnp.arange(6)[:, None])
    else:
        kind = nn.write_circular_cache if name == "circular" else nn.write_cache
        write = functools.partial(kind, position=position, axis=axis)
    wanted = _around(_bits(cache), _bits(new), range(6), axis)
    compiled = jax.jit(write, donate_argnums=0).lower(cache, new).compile()
    memory, place = compiled.memory_analysis(), cache.unsafe_buffer_pointer()
    got = compiled(cache, new)
    assert cache.is_deleted() and got.unsafe_buffer_pointer() == place
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes // 4
    np.testing.assert_array_equal(_bits(got), wanted)


@pytest.mark.parametrize("position", [(0, 1, 2), (3, -1, 0), (2, 2**31 - 1, -(2**31))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_that_does_not_fit_leaves_its_row(dtype, position):
    """R-15: to the bit, in narrow floats too."""
    cache, new = _filled((3, 4, 2), dtype), _new((3, 2, 2), dtype)
    got = jax.jit(nn.write_cache)(cache, new, jnp.asarray(position))
    kept = [p if 0 <= p <= 2 else -1 for p in position]
    np.testing.assert_array_equal(
        _bits(got), _around(_bits(cache), _bits(new), kept, 1)
    )
    many = jax.jit(nn.write_cache)(new, cache, jnp.zeros(3, "int32"))
    np.testing.assert_array_equal(_bits(many), _bits(new))


@pytest.mark.parametrize("blocks", [False, True])
def test_a_write_passes_gradients_on(blocks):
    """To the new tokens, and to the cache but for the slots that they took."""
    with jax.enable_x64(True):
        cache, new = jnp.ones((3, 4, 2)), jnp.ones((3, 2, 2))
        position = jnp.array([1, 3, 6 if blocks else 9], jnp.int32)
        table = jnp.array([[2, 0], [1, -1], [1, 0]])

        def write(cache, new):
            if blocks:
                first = position % jnp.array([8, 8, 8], jnp.int32)
                wrap = jax.jit(nn.write_block_cache)
                return jnp.sin(wrap(cache, new, first, table))
            return jnp.sin(nn.write_circular_cache(cache, new, position))

        check_grads(jax.jit(write), (cache, new), 2)


def test_a_narrow_cache_passes_gradients_on_too():
    """It is written as bits, which have no derivative of their own."""
    cache, new = jnp.ones((2, 4, 1), "bfloat16"), jnp.ones((2, 1, 1), "bfloat16")
    weight = jnp.arange(8.0).reshape(2, 4, 1).astype("bfloat16")

    def loss(cache, new, position):
        return (nn.write_cache(cache, new, position) * weight).sum()

    grads = jax.jit(jax.grad(loss, (0, 1)))(cache, new, jnp.array([2, 1]))
    np.testing.assert_array_equal(grads[1].ravel(), [2, 5])
    kept = np.float32(weight[..., 0]) * np.array([[1, 1, 0, 1], [1, 0, 1, 1]])
    np.testing.assert_array_equal(np.float32(grads[0][..., 0]), kept)
