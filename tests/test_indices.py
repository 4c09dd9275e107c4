"""Index lists: each element from the specification's words, exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax


def sparse(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return (rng.random(shape) < 0.3).astype(dtype) * rng.integers(1, 9, shape)


def nonzero(column):
    found = [i for i, value in enumerate(column) if value != 0]
    return found + [-1] * (len(column) - len(found)), len(found)


@pytest.mark.parametrize("shape", [(256, 4), (7, 3), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_rows_that_are_not_zero(shape, dtype):
    x = jnp.asarray(sparse(shape), dtype)
    indices, counts = jax.jit(neuronjax.find_nonzero_indices)(x)
    assert indices.dtype == counts.dtype == "int32"
    for column, row, count in zip(np.asarray(x).T, indices, counts, strict=True):
        assert (row.tolist(), int(count)) == nonzero(column)


def test_nan_counts_and_a_negative_zero_does_not():
    x = jnp.array([[0.0], [jnp.nan], [-0.0], [jnp.inf]])
    indices, counts = neuronjax.find_nonzero_indices(x)
    assert (indices.tolist(), counts.tolist()) == ([[1, 3, -1, -1]], [2])
    got = neuronjax.find_nonzero_indices_with_count(x.T)
    assert got.tolist() == [[1, 3, -1, -1, 2]]


@pytest.mark.parametrize("start", [0, 2, 5])
def test_a_window_of_columns(start):
    x = jnp.asarray(sparse((16, 8)), "float32")
    whole, counts = neuronjax.find_nonzero_indices(x)
    for run in (lambda f: f, jax.jit):
        got = run(
            lambda s: neuronjax.find_nonzero_indices(x, s, 3, index_dtype="int16")
        )(jnp.array([start]))
        assert got[0].dtype == "int16"
        np.testing.assert_array_equal(got[0], whole[start : start + 3])
        np.testing.assert_array_equal(got[1], counts[start : start + 3])


@pytest.mark.parametrize("start", [7, -1, 100])
def test_a_window_that_leaves_the_input_is_never_moved(start):
    """Concrete: refused. Traced: columns that are not there have no non-zeros."""
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match="must lie inside the 8 of input_tensor"):
        neuronjax.find_nonzero_indices(x, np.array([start]), 2)
    got = jax.jit(lambda s: neuronjax.find_nonzero_indices(x, s, 2))(np.array([start]))
    counts = [4 if 0 <= start + i < 8 else 0 for i in range(2)]
    assert got[1].tolist() == counts


@pytest.mark.parametrize("share", [0.0, 1 / 32, 1.0])
def test_the_count_is_the_last_element(share):
    x = (np.random.default_rng(0).random((1, 64)) < share).astype("int32")
    got = jax.jit(neuronjax.find_nonzero_indices_with_count)(x)
    places, count = nonzero(x[0])
    assert got.tolist() == [[*places, count]]


def flattened(x, f_len, output_len, offsets, start=0, padding=-1):
    """Rows in order, piece by piece, as the specification says."""
    out = np.full(output_len, padding)
    for e, row in enumerate(x):
        for p in range(len(row) // f_len):
            block = offsets[start + e] + p
            if 0 <= block < output_len // f_len:
                out[block * f_len : (block + 1) * f_len] = row[p * f_len :][:f_len]
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("start", [None, 0, 2])
def test_the_last_row_to_write_wins(seed, start):
    rng = np.random.default_rng(seed)
    x = rng.integers(-5, 99, (5, 24), dtype=np.int32)
    offsets = rng.integers(-3, 14, 5 if start is None else 8, dtype=np.int32)
    given = {} if start is None else dict(row_offsets_start=jnp.array([start]))
    wanted = flattened(x, 4, 48, offsets, start or 0, padding=-7)
    run = lambda x, o, g: neuronjax.indexed_flatten(x, 4, 48, o, **g, padding_val=-7)  # noqa: E731
    for f in (run, jax.jit(run)):
        got = f(jnp.asarray(x), jnp.asarray(offsets), given)
        assert got.dtype == "int32"
        np.testing.assert_array_equal(got, wanted)


def test_offsets_that_are_not_there_write_nothing():
    x = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    offsets = jnp.array([0, 2, 1], jnp.int32)
    with pytest.raises(ValueError, match="must lie inside the 3 of row_offsets"):
        neuronjax.indexed_flatten(x, 2, 8, offsets, np.array([2]))
    run = jax.jit(lambda s: neuronjax.indexed_flatten(x, 2, 8, offsets, s))
    assert run(jnp.array([2])).tolist() == [-1, -1, 0, 1, 2, 3, -1, -1]
    assert run(jnp.array([-1])).tolist() == [4, 5, 6, 7, -1, -1, -1, -1]


def test_they_pack_the_tokens_of_experts():
    """Each expert's tokens, in blocks of 4, from a router's choice."""
    chosen = sparse((16, 3), seed=3)
    indices, counts = neuronjax.find_nonzero_indices(jnp.asarray(chosen, "float32"))
    blocks = -(-np.asarray(counts) // 4)
    offsets = np.concatenate([[0], blocks.cumsum()[:-1]]).astype(np.int32)
    got = neuronjax.indexed_flatten(indices, 4, 48, jnp.asarray(offsets))
    for e, offset in enumerate(offsets):
        tokens = got[4 * offset :][: 4 * blocks[e]].tolist()
        places, count = nonzero(chosen[:, e])
        assert [t for t in tokens if t >= 0] == places[:count]


@pytest.mark.parametrize("tiles", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_past_the_count_are_zero(tiles, dtype):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((256, 8)), dtype) for _ in range(2))
    count = jnp.array([[tiles]])
    got = jax.jit(neuronjax.dynamic_elementwise_add)(a, b, count)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[: 128 * tiles], (a + b)[: 128 * tiles])
    assert not got[128 * tiles :].any()
    again = neuronjax.dynamic_elementwise_add(b, a, count)
    np.testing.assert_array_equal(got, again)


def test_rows_past_the_count_may_hold_nan_and_get_no_gradient():
    a = jnp.ones((256, 2)).at[128:].set(jnp.nan)
    run = lambda a, b: neuronjax.dynamic_elementwise_add(a, b, jnp.array([[1]]))  # noqa: E731
    out, pull = jax.vjp(run, a, a)
    assert np.isfinite(out).all()
    for grad in pull(jnp.full_like(out, 3)):
        assert (grad[:128] == 3).all() and not grad[128:].any()
    check_grads(lambda a: jnp.sin(run(a, a)), (jnp.ones((130, 1)),), 1, atol=1e-2, rtol=1e-2)  # fmt: skip # noqa: E501


def test_a_count_past_the_last_tile_is_refused_or_means_all_rows():
    a = jnp.ones((256, 2))
    for count in (3, -1):
        with pytest.raises(ValueError, match="must lie between 0 and M / 128"):
            neuronjax.dynamic_elementwise_add(a, a, np.array([[count]]))
    traced = jax.jit(neuronjax.dynamic_elementwise_add)
    assert (traced(a, a, np.array([[2**30]], np.int32)) == 2).all()
    assert not traced(a, a, np.array([[-1]])).any()


def test_a_size_of_the_error_passes():
    """R-26."""
    report = neuronjax.can("find_nonzero_indices", jnp.ones((200, 3)))
    assert report.nearest == {"T": 256, "C_out": 4}
    assert neuronjax.can("find_nonzero_indices", jnp.ones((256, 4))).on_chip


@pytest.mark.parametrize("name", ["find_nonzero_indices", "indexed_flatten"])
def test_mapped_calls_equal_a_loop(name):
    """R-42."""
    x = jnp.asarray(np.stack([sparse((8, 4), seed=s) for s in range(3)]), "int32")
    run = neuronjax.find_nonzero_indices
    if name == "indexed_flatten":
        offsets = jnp.array([0, 1, 0, 3, 2, 2, 4, 5], jnp.int32)
        run = lambda x: neuronjax.indexed_flatten(x, 2, 16, offsets)  # noqa: E731
    got = jax.tree.leaves(jax.jit(jax.vmap(run))(x))
    for i, one in enumerate(x):
        for a, b in zip(got, jax.tree.leaves(run(one)), strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_subnormal_numbers_are_not_zero():
    """XLA alone takes them for zero."""
    x = jnp.array([[1e-45], [-0.0], [-1e-40], [0.0], [jnp.nan]])
    for run in (lambda f: f, jax.jit):
        indices, counts = run(neuronjax.find_nonzero_indices)(x)
        assert (indices.tolist(), counts.tolist()) == ([[0, 2, 4, -1, -1]], [3])
        got = run(neuronjax.find_nonzero_indices_with_count)(x.T)
        assert got.tolist() == [[0, 2, 4, -1, -1, 3]]


def test_a_start_of_any_dtype_is_read_as_it_is():
    """2**32 - 1 is not -1, of which the second column would be column 0."""
    x = jnp.ones((4, 8))
    run = jax.jit(lambda s: neuronjax.find_nonzero_indices(x, s, 2)[1])
    assert run(np.array([2**32 - 1], np.uint32)).tolist() == [0, 0]
    assert run(np.array([-(2**31)], np.int32)).tolist() == [0, 0]
    assert run(np.array([7], np.uint8)).tolist() == [4, 0]


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint32"])
def test_offsets_at_the_ends_of_their_dtype_write_nothing(dtype):
    with jax.enable_x64(dtype == "int64"):
        x = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)
        info = np.iinfo(dtype)
        for far in (info.min, info.min + 1, info.max):
            offsets = np.array([far, 2, 4, 6], dtype)
            wanted = flattened(x, 2, 16, offsets.tolist())
            got = neuronjax.indexed_flatten(x, 2, 16, jnp.asarray(offsets))
            np.testing.assert_array_equal(got, wanted)


def test_more_rows_and_blocks_than_the_offsets_dtype_counts():
    x = jnp.arange(150, dtype=jnp.int32)[:, None]
    offsets = np.arange(150) % 100 - 20
    got = neuronjax.indexed_flatten(x, 1, 200, jnp.asarray(offsets, jnp.int8))
    np.testing.assert_array_equal(got, flattened(np.asarray(x), 1, 200, offsets))
    a = jnp.ones((17 * 128, 1))
    count = jnp.array([[16]], jnp.int8)
    assert neuronjax.dynamic_elementwise_add(a, a, count).sum() == 2 * 16 * 128


def test_indices_that_their_dtype_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="index_dtype must hold -1 and the largest"):
        neuronjax.find_nonzero_indices(jnp.ones((300, 2)), index_dtype="int8")
    x = jnp.ones((128, 1))
    indices, _ = neuronjax.find_nonzero_indices(x, index_dtype="int8")
    assert indices[0].tolist() == list(range(128))


def test_padding_that_the_dtype_cannot_hold_is_refused():
    x, offsets = jnp.zeros((1, 2), jnp.uint8), jnp.zeros(1, jnp.int32)
    for padding in (-1, 256):
        with pytest.raises(ValueError, match="padding_val must fit"):
            neuronjax.indexed_flatten(x, 2, 4, offsets, padding_val=padding)
    got = neuronjax.indexed_flatten(x, 2, 4, offsets, padding_val=255)
    assert got.tolist() == [0, 0, 255, 255]


def test_chunk_sizes():
    for chunk in ("x", 0):
        with pytest.raises(ValueError, match="chunk_size must be a positive"):
            neuronjax.find_nonzero_indices(jnp.ones((128, 2)), chunk_size=chunk)
    report = neuronjax.can("find_nonzero_indices", jnp.ones((128, 2)), chunk_size=3)
    assert report and not report.on_chip
