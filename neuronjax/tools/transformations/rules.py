"""Checks beside the table: what the rules of one macro must agree on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.dtypes import accumulator
from neuronjax.tools.transformations.case import MacroCase
from neuronjax.tools.transformations.compare import (
    GRADIENT,
    is_float,
    require,
    require_close,
)


def _types(outs) -> list[str]:
    return [f"{x.dtype.name}{list(x.shape)}" for x in outs]


def one_structure(case: MacroCase) -> None:
    """Abstract evaluation, forward, forward rule and reference agree on the outputs."""
    wanted = _types(case.wanted[0])
    found = {
        "abstract evaluation": jax.eval_shape(case.macro, *case.flat),
        "the macro": case.macro(*case.flat),
    }
    names = case.family.output_names(case.config)
    require(
        len(names) == len(wanted),
        f"{len(names)} checkpoint names for {len(wanted)} outputs: {', '.join(names)}",
    )
    if case.family.no_derivative is None:
        dots = [jnp.ones_like(x) for x in case.live]
        rule = functools.partial(jax.jvp, case.of_floats(case.macro))
        outs, moved = jax.eval_shape(rule, case.live, dots)
        found["the forward rule"] = outs
        shapes = [list(x.shape) for x in moved], [list(x.shape) for x in outs]
        require(shapes[0] == shapes[1], f"tangents are {shapes[0]}, not {shapes[1]}")
    for rule, outs in found.items():
        got = _types(outs)
        require(got == wanted, f"{rule} gives {got}, the plain reference {wanted}")


def _seed(out) -> Any:
    """A cotangent of an output."""
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return jnp.ones_like(out)
    return np.zeros(out.shape, jax.dtypes.float0)


def _is_float0(x: Any) -> bool:
    return x.dtype == jax.dtypes.float0


def integer_tangents(case: MacroCase) -> None:
    """Integer operands get float0 cotangents, fp8 ones zeros."""
    if case.family.no_derivative is not None:
        return
    dtypes = []

    def constants(*flat):
        outs, pull = jax.vjp(case.macro, *flat)
        cotangents = pull(tuple(map(_seed, outs)))
        dtypes.extend(x.dtype for x in cotangents)
        # What is float0 has no value that a program could return.
        return [0 if _is_float0(x) or is_float(x) else x for x in cotangents]

    values = jax.jit(constants)(*case.flat)
    for i, (x, dtype, value) in enumerate(zip(case.flat, dtypes, values, strict=True)):
        integer = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
        require(
            (dtype == jax.dtypes.float0) == integer,
            f"operand {i} of {x.dtype} has a cotangent of {dtype}",
        )
        constant = is_float(x) or integer or not np.any(np.float32(value))
        require(constant, f"operand {i} of {x.dtype} has a derivative")


def jacobian(case: MacroCase) -> None:
    """`jax.jacrev`, which maps the backward macro over cotangents alone."""
    if case.family.no_derivative is not None or not any(map(is_float, case.wanted[0])):
        return

    def few(fun):
        def sums(*floats):
            wide = [x for x in case.of_floats(fun)(*floats) if is_float(x)]
            first = wide[0].ravel()[:3]
            return jnp.sin(first.astype(accumulator(first.dtype)))

        return jax.jit(jax.jacrev(sums, tuple(range(len(case.live)))))

    got, wanted = (few(f)(*case.live) for f in (case.macro, case.plain))
    require_close(got, wanted, GRADIENT)
