"""What the rules of the loss read from a call, whatever its arguments are called."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.cross_entropy.names import ON_FACTORS, PEERS
from neuronjax.primitives.kinds import is_count, is_number
from neuronjax.primitives.known import known
from neuronjax.primitives.options import odd_dtype
from neuronjax.primitives.tile import MemrefTile

# Bytes of a chunk of the positions that the chip takes at a time.
CHIP_BYTES = 24 * 2**20


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """Operands by their own names, shapes, and what is wrong with them."""
    given = operands(call)
    matrix = given["x"] if call.function in ON_FACTORS else given["logits"]
    shape = tuple(np.shape(matrix)) if not isinstance(matrix, MemrefTile) else ()
    vocab_of = given["w"] if call.function in ON_FACTORS else matrix
    columns = tuple(getattr(vocab_of, "shape", ()))
    vocab = columns[-1] if columns else 0
    return dict(
        given=given,
        tile=", ".join(k for k, x in given.items() if isinstance(x, MemrefTile)),
        shape=shape,
        w_shape=columns,
        tokens=shape[:-1],
        vocab=vocab,
        odd=odd_dtype({k: given.get(k) for k in ("logits", "x", "w")}),
        odd_shape=_odd_shape(given, shape[:-1]),
        targets_dtype=getattr(given["targets"], "dtype", None),
        whole=_whole(call, vocab),
        positions=int(np.prod(shape[:-1])) if _fixed(shape[:-1]) else None,
        chunk_bytes=_chunk_bytes(call, vocab),
    )


def operands(call: SimpleNamespace) -> dict[str, Any]:
    """The arrays of a call; the vendor's functions name them after their memory."""
    ends = {"logits_hbm": "logits", "targets_hbm": "targets", "lse_state_hbm": "lse"}
    if call.function in PEERS:
        return {ours: getattr(call, k) for k, ours in ends.items() if hasattr(call, k)}
    names = "logits x w targets keep lse d_loss d_lse weights coefficients".split()
    return {name: getattr(call, name) for name in names if hasattr(call, name)}


def _odd_shape(given: dict[str, Any], tokens: tuple[int, ...]) -> str:
    """The first operand that has not one entry a token, described."""
    for name in "targets lse keep d_loss d_lse weights coefficients".split():
        x = given.get(name)
        if x is not None and tuple(np.shape(x)) != tokens:
            return f"{name} of shape {tuple(np.shape(x))}"
    return ""


def _whole(call: SimpleNamespace, vocab: int) -> int | None:
    """Classes of the whole vocabulary; None where the mesh axis alone can tell."""
    if getattr(call, "axis", None) is not None:
        return None
    return getattr(call, "part_of", None) or vocab


def odd_target(call: SimpleNamespace) -> str:
    """The first target, known while tracing, that is no class and not ignored."""
    parted = getattr(call, "part_of", None) is not None
    held = None if parted or call.whole is None else known(call.given["targets"])
    if held is None or not jnp.issubdtype(held.dtype, np.integer):
        return ""
    flat = held.ravel()
    outside = (flat < 0) | (flat >= call.whole)
    ignored = getattr(call, "ignore_index", None)
    if is_count(ignored, -(2**63)):
        outside &= flat != ignored
    keep = known(call.given.get("keep"))
    if keep is not None and keep.shape == held.shape:
        outside &= keep.ravel().astype(bool)
    elif call.given.get("keep") is not None:
        return ""
    return str(flat[outside][0]) if outside.any() else ""


def _fixed(sizes: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _chunk_bytes(call: SimpleNamespace, vocab: int) -> int:
    """Bytes of one chunk of the positions that are worked on together."""
    rows = getattr(call, "positions_per_batch", None)
    if rows is None:
        rows = getattr(call, "hints", {}).get("positions_per_batch", 1)
    chunk = getattr(call, "chunk_size", None) or vocab
    dtype = named_dtype(getattr(call, "dtype", None)) or jnp.dtype(jnp.bfloat16)
    if not is_count(rows) or not is_count(chunk):
        return 0
    return int(rows) * int(chunk) * dtype.itemsize


def named_dtype(value: Any) -> jnp.dtype | None:
    """The dtype that `value` is or names; None when there is none."""
    try:
        return None if value is None else jnp.dtype(value)
    except TypeError:
        return None


def is_fraction(value: Any) -> bool:
    """Whether `value` is a number of [0, 1], known while tracing."""
    return is_number(value) and bool(0 <= value <= 1)


def is_gain(value: Any) -> bool:
    """Whether `value` is a finite number of at least 0, known while tracing."""
    return is_number(value) and bool(0 <= value < np.inf)
