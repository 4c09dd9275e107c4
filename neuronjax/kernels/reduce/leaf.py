"""The norm/reduce leaf: what `NeuronReduceMacro` and its backward run.

`op="norm"` normalises; any other `op` reduces. Statistics, and what was reduced before
the gain, are outputs because the backward reads them.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from neuronjax.kernels.reduce.norm import norm_bwd, norm_fwd
from neuronjax.kernels.reduce.operation import operation_bwd, operation_fwd
from neuronjax.kernels.reduce.options import Options

Values = Float[Array, "..."]


def reduce_fwd(
    x: Values, scale: Values | None, bias: Values | None, *, name: str, **config: Any
) -> tuple[jax.Array, ...]:
    """The norm of each line, or its reduction, and what the backward reads."""
    opts = Options.of(config)
    if opts.op == "norm":
        return norm_fwd(x, scale, bias, opts)
    return operation_fwd(x, scale, opts)


def reduce_bwd(
    x: Values,
    scale: Values | None,
    bias: Values | None,
    *outs_and_cotangents: Values | None,
    name: str,
    **config: Any,
) -> tuple[jax.Array, ...]:
    """The cotangents of those of `(x, scale, bias)` that are given.

    Those of all outputs count.
    """
    opts, half = Options.of(config), len(outs_and_cotangents) // 2
    both = outs_and_cotangents[:half], outs_and_cotangents[half:]
    if opts.op == "norm":
        grads = norm_bwd(x, scale, bias, *both, opts)
    else:
        grads = operation_bwd(x, scale, *both, opts)
    return tuple(grad for grad in grads if grad is not None)
