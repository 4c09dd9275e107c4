"""Every macro's derivatives against float64 finite differences."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives import registry
from neuronjax.tools.gradcheck_report import Gradcheck, Gradient
from neuronjax.tools.trace import inner_jaxprs
from neuronjax.tools.verify.functions import every_label
from neuronjax.tools.verify.operands import QUICKLY, example_of, on_ranks

# A stencil of four points errs by STEP**4, and rounding by 1e-16 / STEP.
STEP = 2e-4
STENCIL = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))
TOLERANCE = 1e-6
Arrays = tuple[Any, ...]
# Forward mode's outputs, reverse mode's operands, both orders of the second one.
Derivatives = tuple[Arrays, Arrays, Arrays]


def gradcheck(
    *names: str,
    tolerance: float = TOLERANCE,
    done: Callable[[Gradient], Any] = lambda row: None,
) -> Gradcheck:
    r"""Checks the derivatives of macros against finite differences, in float64.

    For a macro $f$ on its registered example $x$, random directions $v$ and weights
    $w$, and the loss $L(x) = \sum w \sin f(x)$ over every finite output:

    - forward: `jax.jvp` gives $f'(x)\,v$;
    - reverse: `jax.grad` gives $\nabla_i L \cdot v_i$ for each operand $i$;
    - second order: forward over reverse gives $\nabla^2 L\,v$, and reverse over reverse
      $v^T \nabla^2 L\,v$.

    Each is compared with a difference quotient of four points; an error is relative to
    the largest wanted value. A macro that rounds to a narrower dtype inside has steps
    that no quotient sees through, and the scales of quantized operands are constants:
    it is compared with the derivatives of its plain equations, which pass the rounding
    straight through too.

    Args:
        *names: NAMEs, or variants as the transformation table has them; by default all
            that are registered and have an example, your own kernels among them.
        tolerance: the largest relative error that passes.
        done: called with each row of the report when it is there.

    Returns:
        A report, true if every derivative passes; `print` and `rich.print` show its
        table. A macro that has no derivative is listed with the reason, and one that
        raises, or whose cores need more devices than there are, fails with the error.

    Raises:
        ValueError: no such NAME.

    Example:
        >>> import neuronjax
        >>> report = neuronjax.gradcheck("RoPE", "CumSum")
        >>> bool(report), [row.name for row in report.rows]
        (True, ['RoPE', 'CumSum'])
    """
    labels = names or every_label()
    for label in labels:
        registry.family_of(label)
    rows = []
    for label in labels:
        rows.append(_row(label, tolerance))
        done(rows[-1])
    return Gradcheck(tuple(rows), tolerance)


def _row(label: str, tolerance: float) -> Gradient:
    try:
        return _checked(label, tolerance)
    except Exception as error:  # whatever a kernel raises: others are still checked
        words = " ".join(str(error).split())[:200]
        told = f"{type(error).__name__}: {words}"
        return Gradient(label, None, None, None, None, tolerance, "", told)


def _checked(label: str, tolerance: float) -> Gradient:
    family = registry.family_of(label)
    if family.no_derivative is not None:
        return Gradient(label, None, None, None, None, tolerance, family.no_derivative)
    with jax.enable_x64(True):
        (forward, reverse, second), exact, against = _Probe(label).compare()
        per_operand = [_error(a, b) for a, b in zip(reverse, exact[1], strict=True)]
        worst = int(np.argmax(per_operand)) if per_operand else None
        return Gradient(
            label,
            _error(forward, exact[0]),
            max(per_operand, default=0.0),
            max(_error(a, b) for a, b in zip(second, exact[2], strict=True)),
            worst,
            tolerance,
            against,
        )


class _Probe:
    """One macro as a function of its float operands, with directions and weights."""

    def __init__(self, label: str) -> None:
        family, name = registry.family_of(label), label.split(" ")[0]
        example = example_of(family, label, "float64", 2, 0)
        self._flat, self._tree = jax.tree.flatten(example.operands)
        self._where = [
            i for i, x in enumerate(self._flat) if is_differentiable(x.dtype)
        ]
        self._live = tuple(np.asarray(self._flat[i], np.float64) for i in self._where)
        numbers = np.random.default_rng(0)
        self._directions = tuple(numbers.normal(size=x.shape) for x in self._live)
        config = dict(example.config)
        self._call = on_ranks(
            lambda *operands: tuple(family(*operands, name=name, **config)), example
        )
        self._plain = on_ranks(
            lambda *operands: tuple(family.plain(*operands, name=name, **config)),
            example,
        )

    def _outputs(self, call: Callable[..., tuple], *live: Any) -> Arrays:
        flat = list(self._flat)
        for i, x in zip(self._where, live, strict=True):
            flat[i] = x
        outs = call(*jax.tree.unflatten(self._tree, flat))
        floats = [out for out in outs if is_differentiable(out.dtype)]
        return tuple(jnp.where(jnp.isfinite(out), out, 0) for out in floats)

    def _loss(self, call: Callable[..., tuple], *live: Any) -> Any:
        total = jnp.zeros((), jnp.float64)
        for out in self._outputs(call, *live):
            weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float64))
            wide = jnp.sin(out.astype(jnp.float64)).ravel()
            total += jnp.vdot(weights, wide)
        return total

    def _program(self, call: Callable[..., tuple]) -> Callable[..., Any]:
        """Values and derivatives at a point: all in one, as compiling is most work."""
        outputs = functools.partial(self._outputs, call)
        loss = functools.partial(self._loss, call)
        every = tuple(range(len(self._live)))
        gradient = jax.value_and_grad(loss, every)

        def along(*live: Any) -> Any:
            return _dot(gradient(*live)[1], self._directions)

        def at(*live: Any) -> tuple[tuple, tuple]:
            outs, forward = jax.jvp(outputs, live, self._directions)
            (value, grads), (_, turned) = jax.jvp(gradient, live, self._directions)
            twice = _dot(jax.grad(along, every)(*live), self._directions)
            reverse = _dots(grads, self._directions)
            return (outs, value, grads), (forward, reverse, (*turned, twice))

        return jax.jit(at, compiler_options=QUICKLY)

    def compare(self) -> tuple[Derivatives, Derivatives, str]:
        """Derivatives by the macro's rules, the exact ones, and whence these are."""
        program = self._program(self._call)
        found = jax.device_get(program(*self._live)[1])
        if self._rounds():
            plain = self._program(self._plain)(*self._live)[1]
            return found, jax.device_get(plain), "plain form"
        return found, self._quotients(program), "differences"

    def _quotients(self, program: Callable[..., Any]) -> Derivatives:
        """The same from values of the macro and of its gradient at nearby points."""

        def values(*live: Any) -> Any:
            return jax.device_get(program(*live)[0])

        forward, _, turned = _quotient(values, self._live, self._directions)
        reverse = []
        for i in range(len(self._live)):
            alone = [v if i == j else 0 * v for j, v in enumerate(self._directions)]
            reverse.append(_quotient(values, self._live, alone)[1])
        twice = sum(map(np.vdot, turned, self._directions))
        return forward, tuple(reverse), (*turned, twice)

    def _rounds(self) -> bool:
        """Whether it rounds to a narrower float inside, or takes quantized operands."""
        if any(_is_fp8(x.dtype) for x in self._flat):
            return True
        outputs = functools.partial(self._outputs, self._plain)
        return _casts(jax.make_jaxpr(outputs)(*self._live).jaxpr)


def _is_fp8(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and not is_differentiable(dtype)


def _casts(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("convert_element_type", "reduce_precision"):
            before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            narrower = jnp.issubdtype(after, jnp.floating) and after.itemsize < 8
            if before == jnp.float64 and narrower:
                return True
        if any(map(_casts, inner_jaxprs(eqn))):
            return True
    return False


def _quotient(fun: Callable[..., Any], live: Arrays, along: Sequence[Any]) -> Any:
    """The derivative of `fun` along a direction, from four values."""
    total: Any = None
    for steps, weight in STENCIL:
        moved = [x + steps * STEP * v for x, v in zip(live, along, strict=True)]
        term = jax.tree.map(lambda y, w=weight / STEP: w * y, fun(*moved))
        total = term if total is None else jax.tree.map(np.add, total, term)
    return total


def _dots(arrays: Arrays, others: Arrays) -> Arrays:
    return tuple(jnp.vdot(a, b) for a, b in zip(arrays, others, strict=True))


def _dot(arrays: Arrays, others: Arrays) -> Any:
    return sum(_dots(arrays, others), jnp.zeros((), jnp.float64))


def _error(got: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest wanted value; NaN is infinite."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    worst = 0.0
    for a, b in pairs:
        a, b = np.float64(a), np.float64(b)
        difference = np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf)
        size = max(float(np.abs(b).max(initial=0)), 1e-3)
        worst = max(worst, float(difference.max(initial=0)) / size)
    return worst
