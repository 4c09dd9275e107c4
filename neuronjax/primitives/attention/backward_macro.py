"""The macro `BackwardsAttention`, which every form of prefill attention emits."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention.backward import attention_bwd as backward_leaf
from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.attention.plain import attention_bwd_plain, attention_plain
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.macro import Example, MacroFamily

BACKWARD = "BackwardsAttention"
WITH_OPTIONS = f"{BACKWARD} (window, sink, bias)"
_FLOATS = ("bias", "sink", "k_prior", "v_prior")


def attention_gradients(q, k, v, extras: Extras, *stored, scale: Any, **config):
    """Emits `BackwardsAttention` for any scale: folded into q, and into dq.

    Returns `(dq, dk, dv, d_extras)`; the gradient of an absent operand, or of one that
    has none, is None.
    """
    acc = accumulator(q.dtype)
    unit = not isinstance(scale, jax.Array) and float(scale) == 1.0

    def fold(x):
        factor = scale if isinstance(scale, jax.Array) else float(scale)
        return (x.astype(acc) * jnp.asarray(factor, acc)).astype(x.dtype)

    operands = (q if unit else fold(q), k, v, extras, *stored)
    more = tuple(key for key in _FLOATS if getattr(extras, key) is not None)
    config |= dict(scale=1.0, **(dict(more=more) if more else {}))
    dq, dk, dv, *rest = backwards_attention(*operands, name=BACKWARD, **config)
    d_extras = Extras(**dict(zip(more, rest, strict=True)))
    return dq if unit else fold(dq), dk, dv, d_extras


def _static_leaf(*operands, **config):
    return backward_leaf(*operands, static=True, **config)


def _outputs(*, more: tuple[str, ...] = (), **_: Any) -> tuple[str, ...]:
    return ("dq", "dk", "dv", *(f"d{key}" for key in more))


def _example(label: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 8)
    shapes = (2 * batch, 6, 8), (batch, 8, 7), (batch, 7, 5)
    # Small scores: a vmapped q leaves the statistics behind, and p is not normalised.
    q, k, v = (
        jax.random.normal(key, shape, dtype) / 4
        for key, shape in zip(keys[:3], shapes, strict=True)
    )
    config: dict[str, Any] = dict(scale=1.0, tp_q=True, tp_k=False, tp_out=True)
    config["is_causal"] = True
    extras = Extras()
    if label == WITH_OPTIONS:
        bias = jax.random.normal(keys[6], (2 * batch, 1, 7), dtype) / 4
        sink = jax.random.normal(keys[7], (2 * batch, 1), jnp.float32) / 4
        extras = Extras(bias=bias, sink=sink.astype(accumulator(dtype)))
        config |= dict(window=3, soft_cap=2.0, more=("bias", "sink"))
    outs = attention_plain(q, k, v, extras, name="", **config)
    cotangents = [
        jax.random.normal(key, out.shape, out.dtype)
        for key, out in zip(keys[3:], outs, strict=False)
    ]
    operands = (q, k, v, extras, *outs, *cotangents)
    more = sum(x is not None for x in extras)
    return Example(operands, config, (0,) * (9 + more), (0,) * (3 + more))


backwards_attention = MacroFamily(
    "backwards_attention",
    (BACKWARD,),
    backward_leaf,
    plain=attention_bwd_plain,
    outputs=_outputs,
    static=_static_leaf,
    example=_example,
    variants=(WITH_OPTIONS,),
)
