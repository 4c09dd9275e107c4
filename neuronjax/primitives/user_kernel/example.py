"""The examples of a user's kernel: which axes follow the batch is found out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.macro import Example
from neuronjax.primitives.user_kernel.leaves import Leaf
from neuronjax.primitives.user_kernel.signature import Signature

Axes = tuple[int | None, ...]


def none_given(name: str) -> Callable[[str, Any, int], Example]:
    """What a kernel without an example answers."""

    def example(label: str, dtype: Any, batch: int) -> Example:
        raise ValueError(
            f"{name}: it has no example to check: give register_kernel "
            "example=lambda dtype, batch: operands"
        )

    return example


def forward_example(
    build: Callable[[Any, int], Any],
    leaf: Leaf,
    signature: Signature,
    settings: Mapping[str, Any],
) -> Callable[[str, Any, int], Example]:
    """The `Example` of operands that `build(dtype, batch)` gives.

    An axis whose size differs between two batches is one that a mesh may split.
    """

    def example(name: str, dtype: Any, batch: int) -> Example:
        made = build(dtype, batch)
        if isinstance(made, Example):
            return dataclasses.replace(made, config={**settings, **made.config})
        operands = _operands(name, signature, made)

        def types(size: int) -> tuple[list, list]:
            def run():
                found = _operands(name, signature, build(dtype, size))
                return found, leaf(*found, name=name, **settings)

            ins, outs = jax.eval_shape(run)
            return jax.tree.leaves(ins), jax.tree.leaves(outs)

        small, large = types(batch), types(2 * batch)
        split, out_split = map(_followers, [name] * 2, small, large)
        return Example(operands, settings, split, out_split)

    return example


def _operands(name: str, signature: Signature, made: Any) -> tuple:
    operands = made if isinstance(made, tuple) else (made,)
    try:
        bound = signature.python.bind(*operands, **dict.fromkeys(signature.settings))
    except TypeError as error:
        raise ValueError(
            f"{name}: example must give a tuple of the operands: {error}"
        ) from None
    bound.apply_defaults()
    return jax.tree.map(jnp.asarray, bound.args)


def _followers(name: str, small: list, large: list) -> Axes:
    """For each array the axis whose size follows the batch."""
    found = []
    for i, (a, b) in enumerate(zip(small, large, strict=True)):
        axes = [k for k in range(a.ndim) if a.shape[k] != b.shape[k]]
        if len(axes) > 1:
            raise ValueError(
                f"{name}: axes {axes} of array {i} of the example all follow batch: a "
                "mesh splits one; give a neuronjax.Example, which says which"
            )
        found.append(axes[0] if axes else None)
    return tuple(found)


def backward_example(
    forward: Callable[[str, Any, int], Example],
    name: str,
    leaf: Leaf,
    signature: Signature,
) -> Callable[[str, Any, int], Example]:
    """The example of the backward macro: operands, outputs and cotangents of `name`."""

    def example(label: str, dtype: Any, batch: int) -> Example:
        given = forward(name, dtype, batch)
        outs = tuple(leaf(*given.operands, name=name, **given.config))
        seeds = tuple(jnp.cos(x) if is_differentiable(x.dtype) else None for x in outs)
        live = [is_differentiable(x.dtype) for x in jax.tree.leaves(given.operands)]
        sown = [seed is not None for seed in seeds]
        config = dict(given.config, gradients=gradient_names(signature, given.operands))
        return Example(
            (given.operands, outs, seeds),
            config,
            (*given.split, *given.out_split, *_where(sown, given.out_split)),
            _where(live, given.split),
        )

    return example


def _where(kept: list[bool], axes: Axes) -> Axes:
    return tuple(axis for keep, axis in zip(kept, axes, strict=True) if keep)


def gradient_names(signature: Signature, operands: tuple) -> tuple[str, ...]:
    """What the backward macro's outputs are called: `d_` and the operand's name."""
    pairs = zip(signature.names(operands), jax.tree.leaves(operands), strict=True)
    return tuple(f"d_{word}" for word, x in pairs if is_differentiable(x.dtype))
