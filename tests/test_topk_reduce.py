"""Summing the rows that sparse expert exchange returned, against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax import emit
from neuronjax.kernels.topk_reduce import packed_index
from tests.hlo import collectives

# Subnormal halves, NaN halves of either dtype, halves with a sign bit, no token.
INDICES = [5, 0, 3, 5, 0x7F81, 0x7C01, 0xFFC1, 0x10005, -1, -(2**31), 2**31 - 1, 3]


def packed(rows, index, dtype):
    """`[rows, H + 2]`, laid out byte by byte as the exchange sends it."""
    values = np.asarray(rows, dtype).view(np.uint16)
    halves = np.asarray(index, "<i4").view("<u2").reshape(-1, 2)
    words = np.concatenate([values, halves], axis=1)
    return lax.bitcast_convert_type(jnp.asarray(words), jnp.dtype(dtype))


def reference(rows, index, tokens):
    """`out[t] = sum over r with gid[r] == t of rows[r]`, in float64."""
    out = np.zeros((tokens, np.shape(rows)[1]))
    for row, token in zip(np.asarray(rows, np.float64), index, strict=True):
        if 0 <= token < tokens:
            out[token] += row
    return out


def drawn(count, width, dtype="float32", seed=0):
    values = np.random.default_rng(seed).normal(size=(count, width))
    return np.asarray(values, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 6, 0x8000])
def test_rows_of_a_token_are_summed_whatever_the_bits_of_their_index(dtype, tokens):
    rows = drawn(len(INDICES), 3, dtype)
    got = jax.jit(neuronjax.topk_reduce, static_argnums=(1, 2))(
        packed(rows, INDICES, dtype), tokens, 4
    )
    assert got.dtype == dtype
    wanted = reference(rows, INDICES, tokens).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_float_operation_touches_the_index(dtype):
    x = packed(drawn(len(INDICES), 3, dtype), INDICES, dtype)
    np.testing.assert_array_equal(jax.jit(packed_index)(x), INDICES)
    words = lax.bitcast_convert_type(x, jnp.uint16)  # a stack of floats moves NaNs
    both = lax.bitcast_convert_type(jnp.stack([words, words]), jnp.dtype(dtype))
    each = jax.vmap(packed_index)(both)
    np.testing.assert_array_equal(each, [INDICES, INDICES])
    first, *rest = jax.make_jaxpr(packed_index)(x).eqns
    assert first.primitive.name == "bitcast_convert_type"
    outs = [out.aval.dtype for eqn in (first, *rest) for out in eqn.outvars]
    assert all(jnp.issubdtype(dtype, jnp.integer) for dtype in outs)


def test_every_row_counts_though_k_names_fewer():
    rows = np.ones((5, 2), "bfloat16")
    got = neuronjax.topk_reduce(packed(rows, [1, 1, 1, 1, 0], "bfloat16"), 3, 1)
    assert got.tolist() == [[1, 1], [4, 4], [0, 0]]


def test_sums_are_wide_and_rounded_once():
    rows = np.ones((301, 1), "bfloat16")  # a running bfloat16 sum stops at 256
    got = neuronjax.topk_reduce(packed(rows, [0] * 301, "bfloat16"), 1, 8)
    assert float(got[0, 0]) == 300.0  # the bfloat16 next to 301, ties to even
    once = np.array([[1.0], [2**-8], [2**-8]], "bfloat16")
    got = neuronjax.topk_reduce(packed(once, [0] * 3, "bfloat16"), 1, 3)
    assert float(got[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_without_a_token_are_never_read(poison):
    rows = drawn(4, 3, "bfloat16")
    rows[[1, 3]] = poison
    x = packed(rows, [2, -1, 0, 3], "bfloat16")

    def total(x):
        return jnp.sum(neuronjax.topk_reduce(x, 3, 2).astype(jnp.float32))

    wanted = reference(rows[[0, 2]], [2, 0], 3)
    np.testing.assert_array_equal(neuronjax.topk_reduce(x, 3, 2), wanted)
    grad = jax.grad(total)(x)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad, np.array([[1, 1, 1, 0, 0], [0] * 5] * 2))


def test_the_gradient_is_the_exact_transpose():
    index = jnp.array([1, 0, 1, 4, -1], jnp.int32)
    rows, seed = drawn(5, 3), drawn(2, 3, seed=1)

    def call(rows):
        return emit.top_k_reduce_kernel(rows, index, T=2, K=2)

    _, pull = jax.vjp(call, jnp.asarray(rows))
    wanted = np.concatenate([seed[[1, 0, 1]], np.zeros((2, 3))])
    np.testing.assert_array_equal(pull(jnp.asarray(seed))[0], wanted)
    check_grads(jax.jit(call), (rows,), 2, modes=("fwd", "rev"))
    assert neuronjax.trace(jax.grad(lambda x: call(x).sum()), rows).names == (
        "TopKReduce",
        "TopKReduceBwd",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_separate_indices_take_every_float(dtype):
    with jax.enable_x64(dtype == "float64"):
        rows, index = drawn(7, 2, dtype), np.array([3, 3, 0, 9, 0, 3, -2], np.int32)
        got = emit.top_k_reduce_kernel(jnp.asarray(rows), jnp.asarray(index), T=4, K=3)
        assert got.dtype == dtype
        wanted = reference(rows, index, 4)
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, 4 * eps, eps)


def test_no_rows_give_zeros():
    got = neuronjax.topk_reduce(jnp.zeros((0, 5), jnp.bfloat16), 2, 1)
    np.testing.assert_array_equal(got, np.zeros((2, 3)))


def test_all_transformations_of_a_batch_of_buffers_agree():
    """R-42: a mapped buffer, indices and all, equals a loop."""
    buffers = [
        packed(drawn(6, 2, "bfloat16", seed), index, "bfloat16")
        for seed, index in enumerate([[0, 1, 2, 0, 1, 2], [-1, 7, 0, 0, 0, 0]])
    ]
    each = jax.vmap(lambda x: neuronjax.topk_reduce(x, 3, 4))
    wanted = jnp.stack([neuronjax.topk_reduce(x, 3, 4) for x in buffers])
    np.testing.assert_array_equal(each(jnp.stack(buffers)), wanted)


def test_columns_may_be_split_over_devices():
    """Two cores take half of the columns each, and nothing crosses between them."""
    mesh = jax.make_mesh((2,), ("lnc",), (AxisType.Auto,), devices=jax.devices()[:2])
    index = jnp.array([1, 0, 1, -1], jnp.int32)
    rows = jnp.asarray(drawn(4, 6))
    call = jax.jit(lambda rows: emit.top_k_reduce_kernel(rows, index, T=2, K=2))
    split = jax.device_put(rows, NamedSharding(mesh, P(None, "lnc")))
    assert collectives(call, split) == {}
    np.testing.assert_array_equal(call(split), call(rows))


def test_the_limits_of_the_chip_are_reported_and_do_not_hold():
    x = jax.ShapeDtypeStruct((4, 5), jnp.bfloat16)
    report = neuronjax.can("topk_reduce", x, 129, 9)
    assert report and not report.on_chip
    assert report.nearest == {"T": 128, "K": 8, "H": 4}


@pytest.mark.parametrize("count", [True, 0, 2.0, np.float32(2), 2**31])
def test_counts_are_integers_and_not_flags(count):
    x = packed(drawn(2, 2, "bfloat16"), [0, 1], "bfloat16")
    for name in ("T", "K"):
        with pytest.raises(ValueError, match="T and K must be integers"):
            neuronjax.topk_reduce(x, **(dict(T=2, K=1) | {name: count}))
    wide = neuronjax.topk_reduce(x, np.int64(2), np.int32(1))
    assert wide.shape == (2, 2)


def test_keywords_of_the_config_bag_are_no_hints():
    rows, index = drawn(2, 2), jnp.array([0, 1], jnp.int32)
    for name, value in dict(tokens=1, k=1, static=True, name="CumSum").items():
        with pytest.raises(ValueError, match=f"'{name}' is neither an option nor"):
            emit.top_k_reduce_kernel(rows, index, T=2, K=1, **{name: value})
    hinted = emit.top_k_reduce_kernel(rows, index, T=2, K=1, num_stages=2)
    np.testing.assert_array_equal(hinted, rows)


def test_the_number_of_rows_may_be_symbolic():
    rows = jax.ShapeDtypeStruct((export.symbolic_shape("n")[0], 4), jnp.bfloat16)
    fun = jax.jit(lambda x: neuronjax.topk_reduce(x, 3, 2))
    held = export.export(fun)(rows)
    x = packed(drawn(5, 2, "bfloat16"), [2, 0, 2, -1, 2], "bfloat16")
    np.testing.assert_array_equal(held.call(x), fun(x))
