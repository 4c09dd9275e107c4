"""Pytrees as tuples, lists and dicts of arrays: what any JAX reads, whoever wrote it.

A file says how its arguments are nested. A reader without this package, or without
Flax, knows no `MemrefTile` and no `nnx.State`: their arrays are put into a dict, by the
path that leads to each.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.tree_util import DictKey, keystr

_PLAIN = (tuple, list)


class Layout:
    """The nesting of some arguments, and the plain nesting of the same arrays.

    Args:
        tree: the arguments; only their nesting is kept.

    Raises:
        ValueError: two keys of a dict have the same words.
    """

    def __init__(self, tree: Any):
        self._tree = jax.tree.structure(tree)
        # In place of each array, which of the arrays of `tree` it is.
        self._numbers = _numbered(tree, itertools.count())

    def plain(self, leaves: list[Any]) -> Any:
        """The arrays, in the order of `tree`, nested plainly."""
        return jax.tree.map(lambda i: leaves[i], self._numbers)

    def original(self, plain: Any) -> Any:
        """Plainly nested arrays as they were nested in `tree`."""
        numbers, tree = jax.tree.flatten(self._numbers)
        by_number = dict(zip(numbers, tree.flatten_up_to(plain), strict=True))
        return jax.tree.unflatten(
            self._tree, [by_number[i] for i in range(len(numbers))]
        )


def plain_tree(tree: Any) -> Any:
    """`tree` as tuples, lists and dicts alone.

    Any other node becomes a dict from paths (`"layers.0.key"`) to arrays, and a key
    that is no string its words.

    Raises:
        ValueError: two keys of a dict have the same words.
    """
    return Layout(tree).plain(jax.tree.leaves(tree))


def opened(f: Callable[..., Any], args: tuple) -> tuple[Callable[..., Any], tuple]:
    """`f` and its arguments with a Flax module's parameters in place of the module.

    A module among the arguments becomes its state; a module as `f` has its parameters
    as a new first argument.
    """
    if is_module(f):
        return opened(lambda module, *rest: module(*rest), (f, *args))
    if not any(map(is_module, args)):
        return f, args
    from flax import nnx

    graphs, states = {}, list(args)
    for i, arg in enumerate(args):
        if is_module(arg):
            graphs[i], states[i] = nnx.split(arg)

    def on_states(*states: Any) -> Any:
        whole = [
            nnx.merge(graphs[i], x) if i in graphs else x for i, x in enumerate(states)
        ]
        return f(*whole)

    return on_states, tuple(states)


def is_module(x: Any) -> bool:
    """Whether `x` is a Flax NNX module; Flax is not imported to know it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def _numbered(tree: Any, count: Iterator[int]) -> Any:
    if tree is None:
        return None
    level = _children(tree)
    if level is None:
        return next(count)
    if isinstance(tree, dict):
        return _unique((_words(key), _numbered(child, count)) for key, child in level)
    if type(tree) in _PLAIN:
        return type(tree)(_numbered(child, count) for _, child in level)
    return _unique((".".join(path), next(count)) for path in _paths(tree))


def _children(tree: Any) -> list[tuple[Any, Any]] | None:
    """The keys and children of a node, in JAX's order; `None` for an array."""
    if jax.tree_util.all_leaves([tree]):
        return None
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    return [(path[0], child) for path, child in flat]


def _words(key: Any) -> str:
    return str(key.key) if isinstance(key, DictKey) else keystr((key,), simple=True)


def _paths(tree: Any) -> Iterator[tuple[str, ...]]:
    """The path to each array, in JAX's order; a Flax variable is no step of its own."""
    level = _children(tree)
    if level is None:
        yield ()
        return
    nnx = sys.modules.get("flax.nnx")
    variable = nnx is not None and isinstance(tree, nnx.Variable)
    for key, child in level:
        if child is not None:
            step = () if variable else (_words(key),)
            yield from ((*step, *rest) for rest in _paths(child))


def _unique(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(
                f"export: keys of a dict must differ as words, got two that are {key!r}"
            )
        found[key] = value
    return found
