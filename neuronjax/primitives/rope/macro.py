"""The macros `RoPE` and `RoPEBwd`: the emitter and the families.

The result carries the checkpoint name `rope_out`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels import rope as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.rope.rules import facts

NAME, BACKWARD = "RoPE", "RoPEBwd"


@contracts.contracted(facts)
def rope_kernel(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    full: bool = False,
    interleaved: bool = False,
    **hints: Any,
) -> Array:
    """Emits the macro `RoPE`: the emitter below `RoPE` and `rope_hf`.

    Args:
        x: `[d, batch, heads, seq]`, or with `full` `[batch, heads, seq, d]`.
        cos: `[d/2, batch, seq]`, or with `full` `[batch, seq, d]`.
        sin: like `cos`.
        full: full-width tables and the head dimension last.
        interleaved: pairs `(2i, 2i + 1)` instead of `(i, i + d/2)`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        An array of the shape and dtype of `x`.
    """
    config = dict(full=bool(full), interleaved=bool(interleaved), **hints)
    return rope(x, cos, sin, name=NAME, **config)[0]


def transposed(dy: Array, cos: Array, sin: Array) -> Array:
    """The transposed map of half-split pairs and full-width tables, applied to `dy`."""
    # The map is linear in x, so its transpose needs no x: any array will do.
    return rope_backward(
        jnp.zeros_like(dy), cos, sin, dy, name=BACKWARD, full=True, interleaved=False
    )[0]


def _emit_backward(operands, outs, cotangents, *, name, **config):
    return rope_backward(*operands, *cotangents, name=BACKWARD, **config)


def _plain_backward(x, cos, sin, dy, *, name, **config):
    plain = functools.partial(kernel.rope_plain, name=NAME, **config)
    return jax.vjp(plain, x, cos, sin)[1]((dy,))


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(k, (8, batch, 2, 6), dtype) for k in keys[:2])
    cos, sin = (jax.random.normal(k, (4, batch, 6), dtype) for k in keys[2:])
    config = dict(full=False, interleaved=True)
    if name == NAME:
        return Example((x, cos, sin), config, (1, 1, 1), (1,))
    return Example((x, cos, sin, dy), config, (1, 1, 1, 1), (1, 1, 1))


rope_backward = MacroFamily(
    "rope_bwd",
    (BACKWARD,),
    kernel.rope_bwd,
    plain=_plain_backward,
    outputs=("dx", "dcos", "dsin"),
    example=_example,
)
rope = MacroFamily(
    "rope",
    (NAME,),
    kernel.rope_fwd,
    plain=kernel.rope_plain,
    outputs=("out",),
    backward=_emit_backward,
    example=_example,
)
