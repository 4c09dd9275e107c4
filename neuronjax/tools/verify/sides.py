"""What is compared: a function, a macro, or a macro's plain equations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.context import plain
from neuronjax.primitives import registry
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.tile import MemrefTile
from neuronjax.tools.trace import trace
from neuronjax.tools.verify.operands import settings_of


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two that are compared.

    Attributes:
        name: for the report.
        call: a function of the operands.
        outputs: what its outputs are called, where a family says so.
        tiled: whether its outputs are the `data` of tiles.
    """

    name: str
    call: Callable[..., Any]
    outputs: tuple[str, ...] | None = None
    tiled: bool = False


def name_of(label: str) -> str:
    """The NAME in the label of a variant."""
    return label.split(" ")[0]


def on_family(
    family: MacroFamily, name: str, config: dict[str, Any], fun: Callable
) -> Side:
    """`fun`, the family itself or its plain form, as a function of operands alone."""

    def call(*operands: Any) -> tuple:
        return tuple(fun(*_data(operands), name=name, **config))

    try:
        names = family.output_names(config)
    except TypeError as error:  # the settings that name the outputs are missing
        raise _missing(family, name, error) from None
    outputs = tuple(n.removeprefix(f"{family.family}_") for n in names)
    tiled = config.get("is_tiled", registry.resolve_kernel_config(name).tiled)
    told = name if fun is family else f"{name}'s plain equations"
    return Side(told, call, outputs, bool(tiled))


def macro(label: str, config: dict[str, Any]) -> Side:
    """The macro of a NAME."""
    family = registry.family_of(label)
    return on_family(family, name_of(label), config, family)


def function(f: Callable[..., Any], config: dict[str, Any]) -> Side:
    """A function with those settings that it takes."""
    given = settings_of(f, config)
    return Side(_told(f), lambda *args: f(*args, **given))


def _told(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", None) or type(f).__name__


def reference_of(
    f: Callable[..., Any] | str,
    side: Side,
    args: Sequence[Any],
    against: Callable[..., Any] | str | None,
    config: dict[str, Any],
) -> Side:
    """What `f` is compared with."""
    if isinstance(against, str) or (against is None and isinstance(f, str)):
        label = against if isinstance(against, str) else str(f)
        family = registry.family_of(label)
        reference = on_family(family, name_of(label), config, family.plain)
        require_settings(family, label, reference, args)
        return reference
    if against is not None:
        return _in_plain_form(function(against, config), "{}")
    if not trace(*split(side.call, args)).rows:
        raise ValueError(
            f"verify: {side.name} holds no macro, so that its plain form is itself: "
            f"say against= what it is compared with, a NAME or a function"
        )

    return _in_plain_form(side, "{} in plain()")


def _in_plain_form(side: Side, title: str) -> Side:
    """The same with every macro in it replaced by its plain equations."""

    def call(*args: Any) -> Any:
        with plain():
            return side.call(*args)

    return Side(title.format(side.name), call)


def require_settings(
    family: MacroFamily, label: str, side: Side, args: Sequence[Any]
) -> None:
    """Refuses settings that are unknown or missing, in words of ours.

    Raises:
        ValueError: the settings are not those of NAME.
    """
    call, *arrays = split(side.call, args)
    try:
        jax.eval_shape(call, *arrays)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise _missing(family, label, error) from None


def _missing(family: MacroFamily, label: str, error: TypeError) -> ValueError:
    words = " ".join(str(error).split())
    found: list[Example] = []
    try:
        jax.eval_shape(
            lambda: found.append(family.example(label, jnp.dtype("float32"), 2))
        )
    except (ValueError, TypeError):  # a user's kernel may have no example, or NumPy's
        return ValueError(f"verify: {label}: {words}")
    config = ", ".join(f"{key}={value!r}" for key, value in found[0].config.items())
    count = len(found[0].operands)
    operands = f"{count} operand{'s' * (count != 1)} (None for an absent one)"
    settings = f"settings such as {config}" if config else "no settings"
    return ValueError(f"verify: {label} takes {operands} and {settings}: {words}")


def split(call: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """`call` as a function of the arrays among `args` alone, and these arrays."""
    leaves, tree = jax.tree.flatten(tuple(args))
    where = [i for i, x in enumerate(leaves) if _is_array(x)]

    def of_arrays(*arrays: Any) -> Any:
        whole = list(leaves)
        for i, x in zip(where, arrays, strict=True):
            whole[i] = x
        return call(*jax.tree.unflatten(tree, whole))

    return of_arrays, *(jnp.asarray(leaves[i]) for i in where)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _data(operands: tuple) -> tuple:
    """The operands as a family takes them: the `data` of tiles."""
    return jax.tree.map(
        lambda x: x.data if is_tile(x) else x, operands, is_leaf=is_tile
    )


def is_tile(x: Any) -> bool:
    """Whether `x` is a tile, whose `data` holds its elements."""
    return isinstance(x, MemrefTile)
