"""Cells of values and derivatives, on one device."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from neuronjax.context import plain
from neuronjax.tools.transformations.case import MacroCase
from neuronjax.tools.transformations.compare import (
    GRADIENT,
    SECOND,
    grads,
    loss,
    require,
    require_close,
)


def jitted(case: MacroCase) -> None:
    """The macro equals its plain reference, jitted and operation by operation."""
    require_close(jax.jit(case.macro)(*case.flat), case.wanted[0])
    require_close(case.macro(*case.flat), case.wanted[0])


def in_plain_mode(case: MacroCase) -> None:
    """`neuronjax.plain()` leaves no macro, and the values."""
    with plain():
        count = case.equations(case.macro, *case.flat)
        require(count == 0, f"plain() leaves {count} macros")
        require_close(jax.jit(case.macro)(*case.flat), case.wanted[0])


def grad(case: MacroCase) -> None:
    """Reverse mode equals that of the plain reference."""
    got = grads(case.of_floats(case.macro), len(case.floats))(*case.live)
    require_close(got, case.wanted[1], GRADIENT)


def jvp(case: MacroCase) -> None:
    """Forward mode equals that of the plain reference."""
    dots = [np.cos(x) for x in case.live]
    got, wanted = (
        jax.jit(functools.partial(jax.jvp, case.of_floats(f)))(case.live, dots)
        for f in (case.macro, case.plain)
    )
    require_close(got, wanted, GRADIENT)


def hvp(case: MacroCase) -> None:
    """Forward over reverse equals that of the plain reference."""
    dots = [np.cos(x) for x in case.live]
    got, wanted = (
        jax.jit(lambda a, t, f=f: jax.jvp(grads(case.of_floats(f), len(a)), a, t)[1])(
            tuple(case.live), tuple(dots)
        )
        for f in (case.macro, case.plain)
    )
    require_close(got, wanted, SECOND)


def grad_of_grad(case: MacroCase) -> None:
    """Reverse over reverse equals that of the plain reference."""

    def twice(f):
        first = grads(case.of_floats(f), len(case.floats))
        return jax.grad(
            lambda *a: sum(jnp.vdot(jnp.cos(x), x) for x in first(*a)),
            tuple(range(len(case.floats))),
        )

    got, wanted = (jax.jit(twice(f))(*case.live) for f in (case.macro, case.plain))
    require_close(got, wanted, SECOND)


def scan(case: MacroCase) -> None:
    """The macro in a loop, and the loop's gradient."""

    def steps(f):
        def run(*floats):
            def body(total, factor):
                moved = [x * factor.astype(x.dtype) for x in floats]
                return total + loss(case.of_floats(f))(*moved), factor

            return lax.scan(body, 0.0, jnp.array([1.0, 0.5]))[0]

        if case.family.no_derivative is not None or not case.live:
            return run
        return jax.value_and_grad(run, tuple(range(len(case.live))))

    got, wanted = (jax.jit(steps(f))(*case.live) for f in (case.macro, case.plain))
    require_close(got, wanted, GRADIENT)


def remat(case: MacroCase) -> None:
    """A policy that saves the named outputs runs the forward macro once."""
    config = case.family.differentiated(case.config)
    names = case.family.output_names(config)
    saved = jax.checkpoint_policies.save_only_these_names(*names)
    most = {saved: 1, jax.checkpoint_policies.nothing_saveable: 2}
    for policy, forwards in most.items():
        limit = forwards + case.family.reemits
        kept = jax.checkpoint(case.of_floats(case.macro), policy=policy)
        got = grads(kept, len(case.live))
        times = case.equations(got, *case.live)
        fewer = times < limit and case.family.backward is None
        require(
            times == limit or fewer,
            f"the forward macro runs {times} times, expected {limit}",
        )
        require_close(got(*case.live), case.wanted[1], GRADIENT)


def donation(case: MacroCase) -> None:
    """Donated operands change no value, and no other array is freed."""
    wanted = case.wanted[0]
    copies = [jnp.copy(x) for x in case.flat]
    donating = jax.jit(case.macro, donate_argnums=tuple(range(len(copies))))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        require_close(donating(*copies), wanted)
    deleted = [i for i, x in enumerate(case.flat) if x.is_deleted()]
    require(not deleted, f"operands {deleted} were freed, which were not donated")
