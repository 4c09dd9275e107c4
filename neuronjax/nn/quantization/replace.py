"""Puts other layers in the place of the MLPs and attentions of a model."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from neuronjax.nn.attention import Attention
from neuronjax.nn.mlp import MLP

Make = Callable[..., nnx.Module]


def replace_layers(
    model: nnx.Module, mlp: Make, attention: Make, *, paths: bool = False
) -> nnx.Module:
    """Returns a copy of `model` with every `MLP` and `Attention` replaced.

    Args:
        model: any NNX module; it is not changed, and shares its arrays with the copy.
        mlp: makes the replacement of an `MLP`.
        attention: makes the replacement of an `Attention`.
        paths: call both with the layer's path as a second argument.
    """
    copy = nnx.merge(*nnx.split(model))
    makers = {MLP: mlp, Attention: attention}
    for path, layer in list(nnx.iter_modules(copy)):
        make = makers.get(type(layer))
        if make is not None:
            new = make(layer, path) if paths else make(layer)
            if not path:
                return new
            _put(copy, path, new)
    return copy


def _put(model: nnx.Module, path: tuple[Any, ...], new: nnx.Module) -> None:
    *parents, last = path
    holder: Any = model
    for key in parents:
        holder = holder[key] if isinstance(key, int) else getattr(holder, key)
    if isinstance(last, int):
        holder[last] = new
    else:
        setattr(holder, last, new)
