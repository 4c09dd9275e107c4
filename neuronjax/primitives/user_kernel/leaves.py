"""A user's functions in the form of leaves: flat tuples, checked structure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.user_kernel.signature import Signature

Leaf = Callable[..., tuple]
Count = Callable[..., tuple[str, ...] | None]


def forward_leaf(function: Callable, count: Count, signature: Signature) -> Leaf:
    """The leaf of a function of operands and settings; what is not given is default.

    Args:
        function: the user's.
        signature: of the registered function.
        count: the names of its outputs for some settings; `None` for a single array.
    """

    def leaf(*operands: Any, name: str, **settings: Any) -> tuple:
        operands, settings = signature.split(operands, settings)
        return _outputs(name, function(*operands, **settings), count(**settings))

    leaf.__signature__ = signature.of_leaf()  # pyright: ignore[reportFunctionMemberAccess]
    return leaf


def _outputs(name: str, result: Any, names: tuple[str, ...] | None) -> tuple:
    outs = (result,) if names is None else result
    wanted = "one array" if names is None else f"a tuple of {', '.join(names)}"
    fits = isinstance(outs, tuple) and len(outs) == len(names or (0,))
    if not fits or not all(map(_is_array, outs)):
        hint = "; name several with outputs=" if names is None else ""
        raise ValueError(
            f"{name}: the function must return {wanted}, got {_described(result)}{hint}"
        )
    return tuple(map(jnp.asarray, outs))


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, bool | int | float | complex)


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def backward_leaf(backward: Callable, signature: Signature, single: bool) -> Leaf:
    """The leaf of the backward macro: one gradient for each float array.

    Args:
        backward: the user's, `backward(operands, outs, cotangents, **settings)`.
        signature: of the function that it belongs to, for the messages.
        single: whether that function returns one array and no tuple.
    """

    def leaf(
        operands: tuple,
        outs: tuple,
        cotangents: tuple,
        /,
        *,
        name: str,
        gradients: tuple[str, ...],
        **settings: Any,
    ) -> tuple:
        operands, settings = signature.split(operands, settings)
        if single:
            outs, cotangents = outs[0], cotangents[0]
        found = backward(operands, outs, cotangents, **settings)
        return _gradients(name, found, operands, signature)

    return leaf


def _gradients(name: str, found: Any, operands: tuple, signature: Signature) -> tuple:
    tree = jax.tree.structure(operands)
    if not isinstance(found, tuple) or len(found) != len(operands):
        raise ValueError(
            f"{name}: backward must return a tuple of {len(operands)} gradients, one "
            f"for each operand, got {_described(found)}"
        )
    try:
        grads = tree.flatten_up_to(found)
    except (ValueError, TypeError) as error:
        told = " ".join(str(error).split())
        raise ValueError(
            f"{name}: the gradient of a pytree must be such a pytree: {told}"
        ) from None
    checked = []
    words = signature.names(operands)
    for word, x, grad in zip(words, jax.tree.leaves(operands), grads, strict=True):
        if is_differentiable(x.dtype):
            checked.append(_gradient(name, word, x, grad))
        elif grad is not None:
            raise ValueError(
                f"{name}: {word} is {x.dtype} and has no gradient: return None for it"
            )
    return tuple(checked)


def _gradient(name: str, word: str, x: Any, grad: Any) -> jax.Array:
    if grad is None or not hasattr(grad, "dtype"):
        raise ValueError(
            f"{name}: the gradient of {word} must be an array of shape {x.shape}, got "
            f"{type(grad).__name__}; where there is none, return zeros"
        )
    real = not jnp.iscomplexobj(x)
    kind = jnp.floating if real else jnp.complexfloating
    if grad.shape != x.shape or not jnp.issubdtype(grad.dtype, kind):
        raise ValueError(
            f"{name}: the gradient of {word} must be a "
            f"{'float' if real else 'complex'} array of shape {x.shape}, got "
            f"{grad.dtype}{list(grad.shape)}"
        )
    return grad.astype(x.dtype)
