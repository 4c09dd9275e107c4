"""What `neuronjax export` writes: the example of a macro, or a phase of a model."""

import dataclasses
import difflib
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from neuronjax.primitives import registry
from neuronjax.primitives.macro import Example
from neuronjax.tools.devices import ask_for_devices
from neuronjax.tools.verify.functions import FUNCTIONS, labels_of
from neuronjax.tools.verify.operands import RANKS, example_of, on_ranks
from neuronjax.tools.verify.sides import name_of

SIZE = 2  # of an example's batch axis


class Phase(enum.StrEnum):
    """What a model is asked to do."""

    forward = "forward"
    prefill = "prefill"
    decode = "decode"
    layer = "layer"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function and what it is exported for."""

    call: Callable[..., Any]
    args: tuple


def is_op(what: str) -> bool:
    """Whether `what` is a NAME, a variant of one, or a public function, not a model."""
    try:
        return bool(labels_of(what)) and not Path(what).exists()
    except ValueError:
        return False


def model_path(what: str) -> Path:
    """The file or folder of a model.

    Raises:
        FileNotFoundError: it is neither a model nor a macro; near NAMEs are listed.
    """
    from neuronjax.models.hub import locate

    try:
        return locate(what)
    except FileNotFoundError as error:
        known = {name.lower(): name for name in (*FUNCTIONS, *registry.examples())}
        near = difflib.get_close_matches(what.lower(), known, n=3, cutoff=0.5)
        hint = f", near {', '.join(known[name] for name in near)}" if near else ""
        raise FileNotFoundError(
            f"{error}; nor is it a NAME or function{hint}"
        ) from None


def label_of(op: str) -> str:
    """The one example that `op` means.

    Raises:
        ValueError: it means several; the message lists them.
    """
    labels = labels_of(op)
    if op in labels:
        return op
    if len(labels) > 1:
        raise ValueError(f"{op} emits several macros: take one of {', '.join(labels)}")
    return labels[0]


def of_op(op: str, dtype: str, *, symbolic: bool) -> Subject:
    """The macro of a NAME on its example, as a function of its arrays.

    Raises:
        ValueError: no such NAME, or its example has no batch axis to leave open.
    """
    label = label_of(op)
    ask_for_devices(RANKS)
    family, name = registry.family_of(label), name_of(label)
    example = example_of(family, label, dtype, SIZE, 0)
    flat, tree = jax.tree.flatten(example.operands)

    def macro(*operands: Any) -> tuple:
        return tuple(family(*operands, name=name, **dict(example.config)))

    call = on_ranks(macro, example)

    def on_arrays(*arrays: Any) -> tuple:
        return call(*jax.tree.unflatten(tree, arrays))

    on_arrays.__name__ = name
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat]
    return Subject(on_arrays, tuple(_grown(label, shapes, example, symbolic)))


def _grown(label: str, shapes: list, example: Example, symbolic: bool) -> list:
    if not symbolic:
        return shapes
    axes = example.grows or example.split
    if all(axis is None for axis in axes):
        raise ValueError(f"--symbolic: the example of {label} has no batch axis")
    (batch,) = jax_export.symbolic_shape("b")
    return [
        jax.ShapeDtypeStruct(
            tuple(n // SIZE * batch if i == axis else n for i, n in enumerate(x.shape)),
            x.dtype,
        )
        for x, axis in zip(shapes, axes, strict=True)
    ]


def of_model(
    path: Path,
    phase: Phase,
    *,
    batch: int,
    seq: int,
    slots: int,
    dtype: str,
    symbolic: bool,
) -> Subject:
    """A phase of a model, from its sizes alone: no weight is read.

    The parameters are the first argument.

    Raises:
        ValueError: there are fewer slots than tokens.
    """
    from flax import nnx

    from neuronjax.models.cache import Cache
    from neuronjax.models.checkpoint import read_config
    from neuronjax.models.llama import Llama

    config, kind = read_config(path), jnp.dtype(dtype)
    types: dict[str, Any] = dict(dtype=kind, param_dtype=kind)
    model = nnx.eval_shape(lambda: Llama(config, **types, rngs=nnx.Rngs(0)))
    rows: Any = jax_export.symbolic_shape("b")[0] if symbolic else batch
    tokens = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    if phase == Phase.forward:
        return Subject(model, (tokens,))
    if phase == Phase.layer:
        x = jax.ShapeDtypeStruct((rows, seq, config.d_model), kind)
        table = jax.ShapeDtypeStruct((rows, seq, config.head_dim), jnp.float32)
        return Subject(model.layers[0], (x, table, table))
    if phase == Phase.prefill:
        if slots < seq:
            raise ValueError(f"--slots: expected at least --seq = {seq}, got {slots}")

        def prefill(model: Any, tokens: Any, lengths: Any) -> Any:
            return model.prefill(tokens, lengths, slots)

        return Subject(prefill, (model, tokens, lengths))

    def decode(model: Any, tokens: Any, cache: Any) -> Any:
        return model.decode(tokens, cache)

    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    cache = jax.eval_shape(lambda: Cache.zeros(config, 1, slots, dtype=kind))
    grown = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), cache
    )
    return Subject(decode, (model, one, grown))
