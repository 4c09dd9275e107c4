"""Dtypes of mixed operands, under any promotion setting of the caller."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def promoted(*dtypes: DTypeLike) -> jnp.dtype:
    """The dtype that holds all of `dtypes`.

    `jnp.promote_types` obeys `jax_numpy_dtype_promotion` and refuses under `"strict"`.
    Kernels name their casts, so what the caller chose for implicit ones is no concern.
    fp8, which it never promotes, counts as bfloat16, which holds every fp8 value.
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, map(_no_fp8, dtypes)))


def _no_fp8(dtype: DTypeLike) -> jnp.dtype:
    is_fp8 = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1
    return jnp.dtype(jnp.bfloat16 if is_fp8 else dtype)


def is_differentiable(dtype: DTypeLike) -> bool:
    """Whether a value of `dtype` can have a derivative: a float of two bytes or more.

    The derivative of an fp8 value would be fp8 itself, which cannot hold one: quantized
    values are constants.
    """
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 1


def accumulator(*dtypes: DTypeLike) -> jnp.dtype:
    """The dtype of sums over `dtypes`: float32, or float64 where one of them is."""
    return promoted(jnp.float32, *dtypes)
