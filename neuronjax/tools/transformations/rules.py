"""Checks beside the table: what the rules of one macro must agree on."""

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
        outs, moved = jax.jvp(case.of_floats(case.macro), case.live, dots)
        found["the forward rule"] = outs
        shapes = [list(x.shape) for x in moved], [list(x.shape) for x in outs]
        require(shapes[0] == shapes[1], f"tangents are {shapes[0]}, not {shapes[1]}")
    for rule, outs in found.items():
        got = _types(outs)
        require(got == wanted, f"{rule} gives {got}, the plain reference {wanted}")


def integer_tangents(case: MacroCase) -> None:
    """Integer operands get float0 cotangents, fp8 ones zeros."""
    if case.family.no_derivative is not None:
        return
    _, pull = jax.vjp(case.macro, *case.flat)
    outs = case.macro(*case.flat)
    seeds = tuple(
        jnp.ones_like(o)
        if jnp.issubdtype(o.dtype, jnp.inexact)
        else np.zeros(o.shape, jax.dtypes.float0)
        for o in outs
    )
    for i, (x, cotangent) in enumerate(zip(case.flat, pull(seeds), strict=True)):
        integer = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
        require(
            (cotangent.dtype == jax.dtypes.float0) == integer,
            f"operand {i} of {x.dtype} has a cotangent of {cotangent.dtype}",
        )
        constant = is_float(x) or integer or not np.any(np.float32(cotangent))
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
