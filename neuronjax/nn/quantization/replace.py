"""Puts other layers in the place of the MLPs and attentions of a model."""

from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from neuronjax.nn.attention import Attention
from neuronjax.nn.mlp import MLP

Path = tuple[Any, ...]
Make = Callable[[Any, Path], nnx.Module]


def replace_layers(model: nnx.Module, mlp: Make, attention: Make) -> nnx.Module:
    """Returns a copy of `model` with every `MLP` and `Attention` replaced.

    A layer that stands in several places is replaced by one and the same.

    Args:
        model: any NNX module; it is not changed, and shares its arrays with the copy.
        mlp: makes the replacement of an `MLP` from it and the path of its first place.
        attention: the same for an `Attention`.

    Raises:
        ValueError: a layer is of a subclass, whose computation is not known.
    """
    copy = nnx.merge(*nnx.split(model))
    return _Replacer(mlp, attention).replaced(copy, ())


class _Replacer:
    """One walk over a model; what was seen before is known by its identity."""

    def __init__(self, mlp: Make, attention: Make):
        self._makers = {MLP: mlp, Attention: attention}
        self._done: dict[int, tuple[Any, Any]] = {}

    def replaced(self, value: Any, path: Path) -> Any:
        """`value`, or what comes in its place."""
        if isinstance(value, tuple | list) and not isinstance(value, nnx.Module):
            items = [self.replaced(x, (*path, i)) for i, x in enumerate(value)]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else type(value)(items)
        if isinstance(value, dict):
            new = {k: self.replaced(x, (*path, k)) for k, x in value.items()}
            same = all(new[key] is value[key] for key in value)
            return value if same else new
        if not isinstance(value, nnx.Module):
            return value
        if id(value) not in self._done:
            # The value is held too: an identity is unique only while it lives.
            self._done[id(value)] = value, self._module(value, path)
        return self._done[id(value)][1]

    def _module(self, module: Any, path: Path) -> Any:
        make = self._makers.get(type(module))
        if make is not None:
            return make(module, path)
        if is_projected(module):
            _require_known(module, path)
        for key, value in _places(module):
            new = self.replaced(value, (*path, key))
            if new is not value:
                _put(module, key, new)
        return module


def is_projected(module: Any) -> bool:
    """Whether `module` is an `MLP` or `Attention` that still has its float weights."""
    if isinstance(module, MLP):
        return hasattr(module, "gate")
    return isinstance(module, Attention) and hasattr(module, "qkv")


def _require_known(module: Any, path: Path) -> None:
    kind = type(module).__name__
    base = "nn.MLP" if isinstance(module, MLP) else "nn.Attention"
    place = ".".join(map(str, path)) or "model"
    raise ValueError(
        f"quantize: expected {base} itself at {place}, got its subclass {kind}, whose "
        f"computation is not known"
    )


def _places(module: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(module, nnx.List):
        yield from enumerate(module)
    else:
        yield from list(vars(module).items())


def _put(module: Any, key: Any, new: Any) -> None:
    if isinstance(module, nnx.List):
        module[key] = new
    elif isinstance(new, nnx.Module):
        setattr(module, key, new)
    else:
        setattr(module, key, nnx.data(new))
