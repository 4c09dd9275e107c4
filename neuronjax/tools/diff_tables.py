"""The macro tables that `neuronjax diff` compares."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.tools.export.subjects import Subject, is_op, model_path, of_op
from neuronjax.tools.trace import Trace, trace


def tables_of(
    what: str, *, dtype: str, seq: int, batch: int, gradient: bool
) -> dict[str, Trace]:
    """The tables of a model's phases, or of a macro on its example, by title.

    Raises:
        FileNotFoundError: `what` is neither a model nor a macro.
        ValueError: it means several macros; the message lists them.
    """
    if is_op(what):
        subject = of_op(what, dtype, symbolic=False)
        if gradient:
            return {"gradient on the example": _trace_gradient(subject)}
        return {"on the example": trace(subject.call, *subject.args)}
    # Here: the readers of checkpoints need the extra `models`.
    from neuronjax.models.checkpoint import read_config
    from neuronjax.tools.trace_llama import trace_llama

    config = read_config(model_path(what))
    return trace_llama(config, batch=batch, seq=seq, dtype=dtype, gradient=gradient)


def _trace_gradient(subject: Subject) -> Trace:
    floats = [i for i, x in enumerate(subject.args) if is_differentiable(x.dtype)]
    return trace(jax.grad(_sum(subject.call), floats), *subject.args)


def _sum(call: Callable) -> Callable:
    def total(*arrays: Any) -> Any:
        outs = [out for out in call(*arrays) if is_differentiable(out.dtype)]
        return sum((out.astype(jnp.float32).sum() for out in outs), jnp.float32(0))

    return total
