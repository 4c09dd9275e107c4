"""Every refusal as data: errors, `can`, docs page and refusal tests come from it.

A family adds its rows with `add` in its own file and marks its functions `@contracted`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from neuronjax.primitives.options import bind_call, refusal
from neuronjax.primitives.tile import MIXED, MemrefTile

TAGS = ("math", "hw")
_ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct
_SETTINGS = bool | int | str | enum.Enum


@dataclasses.dataclass(frozen=True)
class Size:
    """What one size of a call may be.

    Attributes:
        name: the size's name in messages, such as `"H"`.
        of: reads it from the call's arguments and facts.
        multiple: it is a multiple of this.
        minimum: it is at least this.
        maximum: it is at most this.
    """

    name: str
    of: Callable[[SimpleNamespace], int]
    multiple: int = 1
    minimum: int = 1
    maximum: int | None = None

    def allows(self, value: int) -> bool:
        """Whether `value` keeps this rule; a symbolic size is left to run time."""
        if not isinstance(value, int):
            return True
        top = math.inf if self.maximum is None else self.maximum
        return self.minimum <= value <= top and value % self.multiple == 0


@dataclasses.dataclass(frozen=True)
class Contract:
    """One rule of one or more functions, and the words in which it is refused.

    Attributes:
        id: `"<family>.<rule>"`, unique.
        functions: the functions that keep it.
        message: a format string over the call's arguments, its facts, `function`, and
            for a size rule `value`. A `literal` one is quoted from the vendor to the
            letter.
        violated: whether a call breaks the rule; a size rule needs none.
        size: the size rule, if this is one.
        example: arguments that break this rule, as a function of the function's name.
        tag: `"math"`: refused always; `"hw"`: a limit of the chip without mathematical
            meaning: reported by `can`, refused only for tiles.
        stage: rules of a later stage are read only when the earlier ones hold; facts
            are computed after stage 0.
        literal: the message is one whole line of the error, unchanged.
    """

    id: str
    functions: tuple[str, ...]
    message: str
    violated: Callable[[SimpleNamespace], bool] | None = None
    size: Size | None = None
    example: Callable[[str], Mapping[str, Any]] | None = None
    tag: str = "math"
    stage: int = 1
    literal: bool = False

    def broken_by(self, call: SimpleNamespace) -> bool:
        """Whether `call` breaks this rule."""
        if self.size is not None:
            return not self.size.allows(self.size.of(call))
        assert self.violated is not None
        return bool(self.violated(call))

    def text(self, call: SimpleNamespace) -> str:
        """The message for `call`."""
        value = None if self.size is None else self.size.of(call)
        return self.message.format(**vars(call), value=value)


@dataclasses.dataclass(frozen=True)
class Violation:
    """A rule that a call breaks."""

    id: str
    tag: str
    message: str
    literal: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """What `can` answers; true when the call runs here.

    Attributes:
        function: which function was asked about.
        violations: every broken rule, those of the chip included.
        nearest: for each size that breaks a rule, the closest one that keeps all of
        them.
    """

    function: str
    violations: tuple[Violation, ...] = ()
    nearest: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def on_chip(self) -> bool:
        """Whether the chip's limits hold too."""
        return not self.violations

    def __bool__(self) -> bool:
        return not any(v.tag == "math" for v in self.violations)

    def __str__(self) -> str:
        if not self.violations:
            return f"{self.function}: yes"
        lines = [f"[{v.tag}] {v.message}" for v in self.violations]
        return "\n".join([f"{self.function}:", *lines, *_nearest_line(self.nearest)])


@dataclasses.dataclass(frozen=True)
class _Contracted:
    function: Callable
    signature: inspect.Signature
    facts: Callable[[SimpleNamespace], Mapping[str, Any]]


CONTRACTS: dict[str, Contract] = {}
FUNCTIONS: dict[str, _Contracted] = {}

FOREIGN_NAME = "Expected to get an {expected} but got {name}"


def add(*contracts: Contract) -> None:
    """Enters rows; an id that is taken, or an unknown tag, is a fault of ours."""
    for contract in contracts:
        assert contract.id not in CONTRACTS, contract.id
        assert contract.tag in TAGS, contract.tag
        CONTRACTS[contract.id] = contract


def told(
    name: str, find: Callable[[SimpleNamespace], Any]
) -> Callable[[SimpleNamespace], bool]:
    """A condition that keeps what it found as the fact `name`, for the message."""
    return lambda call: bool(vars(call).setdefault(name, find(call)))


def all_or_none_tiles(
    emitter: str, arguments: Iterable[str], example: Callable[[str], Mapping[str, Any]]
) -> Contract:
    """The row that refuses a mix of tiles and tensors among `arguments`."""
    names = tuple(arguments)

    def mixed(call: SimpleNamespace) -> bool:
        ios = [getattr(call, name) for name in names]
        tiles = [isinstance(x, MemrefTile) for x in ios if x is not None]
        return any(tiles) and not all(tiles)

    return Contract(
        f"{emitter}.mix", (emitter,), MIXED, mixed, None, example, stage=0, literal=True
    )


def contracted(
    facts: Callable[[SimpleNamespace], Mapping[str, Any]] = lambda call: {},
) -> Callable[[Callable], Callable]:
    """Marks a function whose arguments the table checks before its body runs.

    Args:
        facts: names derived from the arguments (sizes, whether they are `tiled`), for
            the conditions and messages; read after stage 0 holds.
    """

    def mark(function: Callable) -> Callable:
        entry = _Contracted(function, inspect.signature(function), facts)
        name = function.__name__
        FUNCTIONS[name] = entry

        @functools.wraps(function)
        def checked(*args, **kwargs):
            _enforce(name, _call(name, args, kwargs))
            return function(*args, **kwargs)

        return checked

    return mark


def can(op: str | Callable, /, *args: Any, **kwargs: Any) -> Report:
    """Says before tracing whether a call keeps every rule.

    Args:
        op: a public function or emitter, or its name.
        *args: what it would be called with; `jax.ShapeDtypeStruct`s will do.
        **kwargs: the same, by name.

    Returns:
        A report that is true when the call runs here. It lists every violated rule, the
        chip's (`[hw]`) included, and the nearest legal size; or the option that is not
        built yet, or has no meaning for arrays.

    Raises:
        ValueError: no function of that name has contracts.

    Example:
        >>> import jax, neuronjax
        >>> x = jax.ShapeDtypeStruct((60, 1, 2, 8), "float32")
        >>> cos = jax.ShapeDtypeStruct((30, 1, 8), "float32")
        >>> report = neuronjax.can("RoPE", x, cos, cos)
        >>> bool(report), report.on_chip, dict(report.nearest)
        (True, False, {'d': 64})
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    if name not in FUNCTIONS:
        raise ValueError(
            f"can: op must be one of {', '.join(sorted(FUNCTIONS))}, got {name!r}"
        )
    call = _call(name, args, kwargs)
    wrong = _array_for_setting(name, call)
    if wrong:
        return Report(name, (Violation(f"{name}.static", "math", wrong),))
    reason = refusal(name, vars(call))
    if reason is not None:
        return Report(name, (Violation(f"{name}.refused_option", "math", reason),))
    broken = _broken(name, call)
    violations = tuple(Violation(c.id, c.tag, c.text(call), c.literal) for c in broken)
    return Report(name, violations, _nearest(name, call, broken))


def _array_for_setting(name: str, call: SimpleNamespace) -> str:
    """A setting that is given as an array, described: its rules could not read it."""
    for parameter in FUNCTIONS[name].signature.parameters.values():
        value = getattr(call, parameter.name)
        if isinstance(parameter.default, _SETTINGS) and isinstance(value, _ARRAYS):
            return (
                f"{name}: {parameter.name} must be a Python value, known while "
                f"tracing, got an array of shape {tuple(value.shape)}"
            )
    return ""


def rows_of(function: str) -> list[Contract]:
    """The rows that `function` keeps, in the order in which they are read."""
    rows = [c for c in CONTRACTS.values() if function in c.functions]
    return sorted(rows, key=lambda c: c.stage)


def _call(name: str, args: tuple, kwargs: Mapping[str, Any]) -> SimpleNamespace:
    bound = bind_call(name, FUNCTIONS[name].signature, args, kwargs)
    bound.apply_defaults()
    return SimpleNamespace(function=name, **bound.arguments)


def _broken(name: str, call: SimpleNamespace) -> list[Contract]:
    """The violated rows, up to the first stage that has a [math] one."""
    rows, broken = rows_of(name), []
    for stage in sorted({c.stage for c in rows} | {0, 1}):
        if stage == 1:
            vars(call).update(FUNCTIONS[name].facts(call))
        broken += [c for c in rows if c.stage == stage and c.broken_by(call)]
        if any(c.tag == "math" for c in broken):
            break
    return broken


def _enforce(name: str, call: SimpleNamespace) -> None:
    wrong = _array_for_setting(name, call)
    if wrong:
        raise ValueError(wrong)
    broken = _broken(name, call)
    tags = TAGS if getattr(call, "tiled", False) else ("math",)
    refused = [c for c in broken if c.tag in tags]
    if refused:
        lines = [c.text(call) for c in refused]
        nearest = _nearest(name, call, refused, tags)
        raise ValueError("\n".join([*lines, *_nearest_line(nearest)]))


def _nearest(
    name: str,
    call: SimpleNamespace,
    broken: Iterable[Contract],
    tags: tuple[str, ...] = TAGS,
) -> dict[str, int]:
    """For each broken size, the closest value that every rule on that size allows."""
    asked = {c.size.name: c.size.of(call) for c in broken if c.size is not None}
    rows = [c for c in rows_of(name) if c.tag in tags]
    sizes = [c.size for c in rows if c.size is not None]
    return {
        size: _closest([s for s in sizes if s.name == size], value)
        for size, value in asked.items()
    }


def _closest(rules: list[Size], value: int) -> int:
    step = math.lcm(*(rule.multiple for rule in rules))
    lowest = max(rule.minimum for rule in rules)
    highest = min((r.maximum for r in rules if r.maximum is not None), default=math.inf)
    first = -(-lowest // step) * step
    below = max(value // step * step, first)
    above = max(-(-value // step) * step, first)
    if above > highest:
        return min(below, int(highest // step * step))
    return below if value - below < above - value else above


def _nearest_line(nearest: Mapping[str, int]) -> list[str]:
    if not nearest:
        return []
    sizes = ", ".join(f"{name} = {value}" for name, value in nearest.items())
    return [f"nearest sizes that pass every rule: {sizes}"]
