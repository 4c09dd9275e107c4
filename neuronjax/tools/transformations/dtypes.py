"""Cells of dtypes."""

import jax
import numpy as np
from jax.test_util import check_grads

from neuronjax.tools.transformations.case import MacroCase
from neuronjax.tools.transformations.compare import (
    error,
    is_float,
    loss,
    require,
    require_close,
)


def bfloat16(case: MacroCase) -> None:
    """The macro errs at most twice as much as the plain bfloat16 computation."""
    low = MacroCase(case.label, "bfloat16")
    got, plain = low.both(low.macro, *low.flat), low.wanted
    types = [[x.dtype.name for x in outs] for outs in (got[0], plain[0])]
    require(types[0] == types[1], f"expected outputs of {types[1]}, got {types[0]}")
    with jax.enable_x64(True):
        wide = [np.float64(x) if is_float(x) else x for x in low.flat]
        exact = low.both(low.plain, *wide)
    arrays = zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True)
    for i, (a, b, c) in enumerate(arrays):
        own, limit = error(a, c), 2 * error(b, c) + 2**-8
        require(
            own <= limit,
            f"array {i} of outputs and gradients errs by {own:.1e} of its largest "
            f"value, the plain computation allows {limit:.1e}",
        )


def x64(case: MacroCase) -> None:
    """In float64 to its precision, and against finite differences."""
    with jax.enable_x64(True):
        case = MacroCase(case.label, "float64")
        (outs, got), (exact, gradient) = case.both(case.macro, *case.flat), case.wanted
        require_close(outs, exact, 1e-11)
        require_close(got, gradient, 1e-10)
        # Scales are constants and roundings pass straight through: a numeric derivative
        # sees neither.
        fp8 = case.config.get("is_fp8_kernel", False)
        blocks = case.config.get("quantization") == "MX"
        live = case.live and case.family.no_derivative is None
        if live and not (fp8 or blocks):
            fun = jax.jit(loss(case.of_floats(case.macro)))
            check_grads(fun, case.live, 1, eps=1e-5)
