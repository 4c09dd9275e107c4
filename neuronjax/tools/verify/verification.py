"""`neuronjax.verify`: a function, its plain form, and its float64 reference."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from neuronjax.context import settings
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives import registry
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.tools.verify.comparison import Comparison, compare
from neuronjax.tools.verify.operands import example_of, on_ranks, settings_of
from neuronjax.tools.verify.report import Verification
from neuronjax.tools.verify.settings import require_known
from neuronjax.tools.verify.sides import (
    Side,
    function,
    is_tile,
    macro,
    name_of,
    on_family,
    reference_of,
    require_settings,
    split,
)


@dataclasses.dataclass(frozen=True)
class _Output:
    name: str
    value: np.ndarray
    tiled: bool


def verify(
    f: Callable[..., Any] | str,
    *args: Any,
    against: Callable[..., Any] | str | None = None,
    partition_axis: int = -1,
    **config: Any,
) -> Verification:
    """Compares a function with the same computation in float64.

    Three computations run on the same operands: `f`; the reference with every float
    operand cast to float64, under x64; the reference in the operands' own dtypes (the
    plain computation). `f` passes where each output errs against float64 at most twice
    as much as the plain computation does, plus one unit in the last place of the
    largest value. Integers pass where at most twice as many differ.

    Args:
        f: a public function, an emitter, a function of your own, or a NAME, which
            stands for its macro; a NAME without `args` runs on its registered example.
        *args: the operands, pytrees of arrays; anything else among them is handed on
            as it is.
        against: the reference: a NAME, for that macro's plain equations; or a function
            that follows the dtypes it is given. By default `f` itself. Macros in a
            reference are replaced by their plain equations.
        partition_axis: the axis of a result that is laid on the 128 partitions, for the
            tile that a report names; those of a tile are its own.
        **config: settings. A NAME takes all of them, and the hints of its emitter; a
            function those that its signature has.

    Returns:
        A report, true if every output passes. Per output: the worst element with its
        coordinates and the partition and chunk of a tile that holds it, absolute and
        relative errors, the error of the plain computation, and how many elements are
        how many units in the last place away. `print` and `rich.print` show it.

    Raises:
        ValueError: outputs of `f` and of the reference differ in number, shape or kind;
            a setting is unknown or missing; or `f` holds no macro and nothing is said
            to compare it with.

    Example:
        >>> import jax, jax.numpy as jnp, neuronjax
        >>> x = jax.random.normal(jax.random.key(0), (4, 256))
        >>> report = neuronjax.verify(neuronjax.rms_norm, x, jnp.ones(256))
        >>> bool(report), report.outputs[0].shape
        (True, (4, 256))
        >>> def careless(x, scale, eps=1e-6):
        ...     return x * jnp.max(jnp.abs(x), -1, keepdims=True) * scale
        >>> true = neuronjax.rms_norm
        >>> bool(neuronjax.verify(careless, x, jnp.ones(256), against=true))
        False
    """
    if settings().plain:
        raise ValueError("verify: no macro runs inside neuronjax.plain(): leave it")
    _require_concrete(args)
    for label in (f, against):
        if isinstance(label, str):
            require_known(label, config)
    if isinstance(f, str) and not args:
        family = registry.family_of(f)
        example = example_of(family, f, "float32", 2, 0)
        return _verify_example(f, family, example, config, against)
    side = function(f, config) if callable(f) else macro(f, config)
    if not callable(f):
        require_settings(registry.family_of(f), f, side, args)
    reference = reference_of(f, side, args, against, config)
    unknown = sorted(set(config) - _taken(f, against, config))
    if unknown:
        raise ValueError(f"verify: {side.name} has no setting {', '.join(unknown)}")
    return _compared(side, reference, args, partition_axis)


def verify_example(
    label: str, *, dtype: str = "float32", size: int = 2, seed: int = 0
) -> Verification:
    """Compares the macro of a NAME with its plain equations on its registered example.

    Args:
        label: a NAME, or a variant of one as the transformation table has it.
        dtype: of the float operands.
        size: of the example's batch axis.
        seed: other numbers, drawn as those of the example are.

    Raises:
        ValueError: no such NAME, or its example does not have that size.
    """
    family = registry.family_of(label)
    example = example_of(family, label, dtype, size, seed)
    return _verify_example(label, family, example, {}, None)


def _verify_example(
    label: str,
    family: MacroFamily,
    example: Example,
    config: dict[str, Any],
    against: Callable[..., Any] | str | None,
) -> Verification:
    bag = dict(example.config) | config
    macro = on_family(family, name_of(label), bag, family)
    side = dataclasses.replace(macro, name=label, call=on_ranks(macro.call, example))
    require_settings(family, label, side, example.operands)
    if against is None:
        plain_form = on_family(family, name_of(label), bag, family.plain)
        call = on_ranks(plain_form.call, example)
        reference = dataclasses.replace(plain_form, call=call)
        require_settings(family, label, reference, example.operands)
    else:
        reference = reference_of(label, side, example.operands, against, bag)
    return _compared(side, reference, example.operands, -1)


def _taken(f: Any, against: Any, config: dict[str, Any]) -> set[str]:
    """The settings that somebody takes; a NAME answers for its own."""
    if isinstance(f, str) or isinstance(against, str):
        return set(config)
    sides = [f] if against is None else [f, against]
    return set().union(*(settings_of(side, config) for side in sides))


def _compared(
    side: Side, reference: Side, args: Sequence[Any], axis: int
) -> Verification:
    got = _outputs(side, side.call(*args))
    exact = _outputs(reference, _in_float64(reference.call, args))
    low = _outputs(reference, _compiled(*split(reference.call, args)))
    got = _named(side, reference, got, exact)
    _require_alike(side, reference, got, exact)
    compared = []
    for mine, plainly, exactly in zip(got, low, exact, strict=False):
        where = None if mine.tiled else axis
        values = mine.value, plainly.value, exactly.value
        compared.append(compare(mine.name, *values, axis=where))
    notes = tuple(_notes(side, reference, compared, exact))
    return Verification(side.name, reference.name, tuple(compared), notes)


def _compiled(call: Callable[..., Any], *arrays: Any) -> Any:
    # A backend may keep more bits between operations than the dtype has: the plain
    # computation that `f` is measured by rounds where it is written to round.
    exactly = {"xla_allow_excess_precision": False}
    return jax.jit(call, compiler_options=exactly)(*arrays)


def _in_float64(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    of_arrays, *arrays = split(call, args)
    with jax.enable_x64(True):
        wide = [
            x.astype(jnp.float64) if is_differentiable(x.dtype) else x for x in arrays
        ]
        return jax.jit(of_arrays)(*wide)


def _require_concrete(args: Sequence[Any]) -> None:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        raise ValueError(
            "verify: expected arrays, got traced ones: call it outside jit"
        )


def _outputs(side: Side, outs: Any) -> list[_Output]:
    """Flat outputs in NumPy, with their names."""
    flat, _ = jax.tree_util.tree_flatten_with_path(outs, is_leaf=is_tile)
    found = []
    for i, (path, out) in enumerate(flat):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "out"
        if side.outputs is not None and i < len(side.outputs):
            name = side.outputs[i]
        value = np.asarray(out.data if is_tile(out) else out)
        found.append(_Output(name, value, side.tiled or is_tile(out)))
    return found


def _named(
    side: Side, reference: Side, got: list[_Output], exact: list[_Output]
) -> list[_Output]:
    """Outputs of `f` under the names that the reference's family gives them."""
    if side.outputs is not None or reference.outputs is None:
        return got
    pairs = zip(got, exact, strict=False)
    named = [dataclasses.replace(mine, name=theirs.name) for mine, theirs in pairs]
    return named + got[len(named) :]


def _require_alike(
    side: Side, reference: Side, got: list[_Output], exact: list[_Output]
) -> None:
    # A leaf returns what its backward reads too: a function may stop before that.
    enough = reference.outputs is not None and 0 < len(got) < len(exact)
    if len(got) != len(exact) and not enough:
        raise ValueError(
            f"verify: {side.name} has {len(got)} outputs and {reference.name} "
            f"{len(exact)}: expected as many"
        )
    for mine, theirs in zip(got, exact, strict=False):
        a, b = mine.value, theirs.value
        if a.shape != b.shape or _is_float(a) != _is_float(b):
            raise ValueError(
                f"verify: output {mine.name} of {side.name} is {a.dtype}"
                f"{list(a.shape)} and that of {reference.name} {b.dtype}"
                f"{list(b.shape)}: expected the same shape, both floats or both "
                "integers"
            )
        if jnp.issubdtype(a.dtype, jnp.complexfloating):
            raise ValueError(
                f"verify: output {mine.name} of {side.name} is complex: return its "
                "real and imaginary parts"
            )


def _is_float(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _notes(
    side: Side, reference: Side, compared: list[Comparison], exact: list[_Output]
) -> list[str]:
    notes = [
        f"the reference of {output.name} is {output.exact_dtype}: it casts, whatever "
        "its operands are"
        for output in compared
        if jnp.issubdtype(output.exact_dtype, jnp.floating)
        and output.exact_dtype != np.float64
    ]
    if len(compared) < len(exact):
        rest = ", ".join(output.name for output in exact[len(compared) :])
        notes.append(f"{side.name} does not return {rest} of {reference.name}")
    return notes
