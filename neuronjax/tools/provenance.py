"""`neuronjax.poison`: which macro lets through what it must not read."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.context import settings, watching
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.shard_common import uniform
from neuronjax.primitives.macro import MacroFamily
from neuronjax.tools.provenance_report import Poisoning

Arrays = Sequence[Any]


@contextlib.contextmanager
def poison() -> Iterator[Poisoning]:
    """Inside the `with` block every macro is examined with NaN where it must not look.

    Before a macro's result is used, its plain equations tell which elements of its
    operands they do not see: padding rows, unused cache slots, masked keys, experts
    without tokens. These are elements without any derivative, there and nearby, and
    which other finite values replace without a trace in any output. The macro runs once
    more with NaN in all of them, and an output that is NaN where the plain equations
    give a number is a leak. The model itself goes on with the untouched result, so each
    macro is examined alone: the one that is named is the one that leaks.

    Operands that hold NaN already, because you put it into unused slots yourself or an
    earlier macro leaked it, are followed: an output may be NaN where the plain
    equations see such an element, and only there.

    It works under `jit`, `grad`, `scan`, `vmap` and `shard_map`; the macros of a
    gradient are examined too. A model in it is traced and compiled anew, and runs some
    six times the work.

    Yields:
        A report, complete when the block ends: true if at least one macro ran and none
        leaked; `first` is the first leak, with NAME, output and layer.

    Raises:
        ValueError: inside `neuronjax.plain()`, where no macro runs.

    Example:
        >>> import jax.numpy as jnp, neuronjax
        >>> q = jnp.ones((1, 4, 8))
        >>> with neuronjax.poison() as report:
        ...     out = neuronjax.attention_cte(q, q, q, tp_k=True, sliding_window=2)
        >>> bool(report), report.first
        (True, None)
    """
    if settings().plain:
        raise ValueError("poison: no macro runs inside neuronjax.plain(): leave it")
    report, order = Poisoning(), itertools.count()

    def watch(family: MacroFamily, leaves: Arrays, params: dict, outs: Arrays) -> None:
        frozen = [lax.stop_gradient(x) for x in (*leaves, *outs)]
        found = _examination(family, **params)(*frozen)
        names = family.output_names(dict(params["config"]))
        told = tuple(name.removeprefix(f"{family.family}_") for name in names)
        shapes = tuple(out.shape for out in outs)
        record = functools.partial(
            report.record, next(order), params["name"], told, shapes
        )
        jax.debug.callback(record, *found)

    with watching(watch):
        yield report
        jax.effects_barrier()


@functools.cache
def _examination(family: MacroFamily, *, name: str, config: Any, tree: Any) -> Callable:
    """Operands and outputs to leaks a output, where the first is, and NaN filled in."""
    n = tree.num_leaves

    def plain(leaves: Arrays) -> list[Any]:
        operands = jax.tree.unflatten(tree, list(leaves))
        return list(family.plain(*operands, name=name, **dict(config)))

    def examine(*arrays: Any) -> tuple[Any, Any, Any]:
        with watching(None):
            leaves, outs = list(arrays[:n]), arrays[n:]
            clean = _filled(leaves, list(map(_is_nan, leaves)), 1.0)
            exact, other, unseen = _unseen(plain, leaves, clean)
            spoiled = [
                jnp.where(hidden, jnp.asarray(jnp.nan, x.dtype), x)
                if is_differentiable(x.dtype)
                else x
                for x, hidden in zip(leaves, unseen, strict=True)
            ]
            params = dict(name=name, config=config, tree=tree, axes=())
            got = family.macro_p.bind(*spoiled, **params)
            leaks = list(map(_leaks, got, outs, exact, other))
            counts = jnp.stack([jnp.sum(leak, dtype=jnp.int32) for leak in leaks])
            firsts = jnp.stack([_first(leak) for leak in leaks])
            filled = sum(jnp.sum(hidden, dtype=jnp.int32) for hidden in unseen)
            return counts, firsts, jnp.asarray(filled, jnp.int32)

    return jax.jit(examine)


def _unseen(
    plain: Callable[[Arrays], list[Any]], leaves: Arrays, clean: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """The plain outputs, the same with other numbers for NaN, and what they do not see.

    A derivative of zero at two points makes a candidate; candidates of one operand
    whose values can be replaced without a change are unseen.
    """
    live = [i for i, x in enumerate(clean) if is_differentiable(x.dtype)]
    still = _without_derivative(plain, clean, live)
    candidates = [jnp.zeros(x.shape, bool) for x in clean]
    for i, none in zip(live, still, strict=True):
        candidates[i] = none & ~_is_nan(leaves[i])

    # One loop body for all: two programs might differ in the last bit.
    def changed(operand: Any) -> list[Any]:
        chosen = [c & (operand == i) for i, c in enumerate(candidates)]
        given = [_is_nan(x) & (operand == len(clean)) for x in leaves]
        return plain(_filled(_filled(clean, chosen, 3.0), given, -2.0))

    every = lax.map(changed, jnp.arange(-1, len(clean) + 1, dtype=jnp.int32))
    same = [_same(x[1:-1], x[:1]).reshape(len(clean), -1) for x in every]
    free = jnp.all(jnp.concatenate(same, 1), 1)
    unseen = [c & free[i] for i, c in enumerate(candidates)]
    return [x[0] for x in every], [x[-1] for x in every], unseen


def _without_derivative(
    plain: Callable[[Arrays], list[Any]], clean: list[Any], live: list[int]
) -> list[Any]:
    """Where each live operand has no derivative at all, there and nearby."""

    def outputs(*values: Any) -> list[Any]:
        whole = list(clean)
        for i, x in zip(live, values, strict=True):
            whole[i] = x
        return [out for out in plain(whole) if is_differentiable(out.dtype)]

    def still(values: Any) -> list[Any]:
        floats, pull = jax.vjp(outputs, *values)
        if not floats:
            return [jnp.zeros(x.shape, bool) for x in values]
        seeds = [_wave(out, 1.0) + jnp.asarray(2, out.dtype) for out in floats]
        return [grad == 0 for grad in pull(seeds)]

    # One loop body again, as compiling it is most of the work.
    nearby = _moved(clean, live)
    points = [jnp.stack([clean[i], nearby[i]]) for i in live]
    return [jnp.all(x, 0) for x in lax.map(still, points)]


def _filled(leaves: Arrays, where: Arrays, size: float) -> list[Any]:
    """The operands with finite numbers in place of chosen elements."""
    return [
        jnp.where(chosen, _wave(x, size), x) if is_differentiable(x.dtype) else x
        for x, chosen in zip(leaves, where, strict=True)
    ]


def _moved(clean: list[Any], live: list[int]) -> list[Any]:
    """A point nearby: a value that is zero by chance hides nothing there."""
    moved = list(clean)
    for i in live:
        moved[i] = clean[i] + _wave(clean[i], 0.25)
    return moved


def _wave(x: Any, size: float) -> Any:
    """Numbers between `-size` and `size`, few of them alike, that vary as `x` does."""
    angles = jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) * 1.7 + 0.3
    return uniform((size * jnp.cos(angles)).astype(x.dtype), x)[0]


def _is_nan(x: Any) -> Any:
    if not is_differentiable(x.dtype):
        return jnp.zeros(x.shape, bool)
    return jnp.isnan(x)


def _same(a: Any, b: Any) -> Any:
    return (a == b) | (_is_nan(a) & _is_nan(b))


def _leaks(got: Any, out: Any, exact: Any, other: Any) -> Any:
    """Elements that are bad though the plain equations give a number there."""
    followed = ~_same(exact, other)
    if is_differentiable(got.dtype):
        return jnp.isnan(got) & ~_is_nan(exact) & ~followed
    if jnp.issubdtype(got.dtype, jnp.floating):
        got, out = got.astype(jnp.float32), out.astype(jnp.float32)
    return ~_same(got, out) & ~followed


def _first(leak: Any) -> Any:
    return jnp.argmax(leak.ravel()).astype(jnp.int32) if leak.size else jnp.int32(0)
