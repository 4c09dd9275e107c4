"""The rules of calls of the loss, one row each."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size, told
from neuronjax.primitives.cross_entropy.facts import (
    CHIP_BYTES,
    is_fraction,
    is_gain,
    named_dtype,
    odd_target,
)
from neuronjax.primitives.cross_entropy.names import (
    ALL,
    BACKWARD_REDUCTIONS,
    BACKWARDS,
    KERNELS,
    LINEAR_KERNEL,
    LINEAR_LOSS,
    LOSS,
    ON_FACTORS,
    PEERS,
    PUBLIC,
    REDUCTIONS,
)
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_count, is_flag
from neuronjax.primitives.options import FLOATS, odd_dtype
from neuronjax.primitives.tile import MemrefTile

_CHIP = tuple(map(jnp.dtype, ("bfloat16", "float32")))


def arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`, named as each function does."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(targets=np.zeros(3, np.int32))
        given["x" if function in ON_FACTORS else "logits"] = np.zeros((3, 5), "float32")
        if function in ON_FACTORS:
            given["w"] = np.zeros((5, 4), np.float32)
        if function in BACKWARDS:
            given["lse"] = np.ones(3, np.float32)
        if function in PEERS:
            given["chunk_size"] = 5
        if function == LINEAR_KERNEL:
            given["coefficients"] = np.ones(3, np.float32)
        given |= changes
        if "matrix" in given:
            given["x" if function in ON_FACTORS else "logits"] = given.pop("matrix")
        if function not in PEERS:
            return given
        ends = dict(logits="logits_hbm", targets="targets_hbm", lse="lse_state_hbm")
        return {ends.get(name, name): x for name, x in given.items()}

    return build


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    text = "{function}: " + message
    id = f"cross_entropy.{rule}"
    contracts.add(Contract(id, functions, text, *args, **kwargs))


def _tiled(function: str) -> dict[str, Any]:
    name = "x" if function in ON_FACTORS else "logits"
    tile = MemrefTile.from_tensor(jnp.zeros((8, 5)), 0)
    return arguments(**{name: tile})(function)


for _kernel in (*KERNELS, LINEAR_KERNEL):
    contracts.add(only_hints(_kernel, arguments(), ("positions_per_batch",)))
_row(
    "tensor",
    ALL,
    "the loss has no tiled form: {tile} must be tensors",
    lambda c: c.tile,
    example=_tiled,
)
_row(
    "matrix",
    PEERS,
    "logits must have shape [P, V], got {shape}",
    lambda c: not c.tile and len(c.shape) != 2,
    example=arguments(matrix=np.zeros((3, 1, 5), np.float32)),
)
_row(
    "rank",
    (*KERNELS, LOSS),
    "logits must have shape [*tokens, V] with V at least 1, got {shape}",
    lambda c: not c.tile and (not c.shape or c.shape[-1] == 0),
    example=arguments(matrix=np.zeros((3, 0), np.float32)),
)
_row(
    "empty",
    PEERS,
    "V must be at least 1, got logits of shape {shape}",
    lambda c: len(c.shape) == 2 and c.shape[1] == 0,
    example=arguments(matrix=np.zeros((3, 0), np.float32)),
)
_row(
    "factors",
    (LINEAR_LOSS,),
    "x must have shape [*tokens, H] and w [H, V] with V at least 1, got {shape} and "
    "{w_shape}",
    lambda c: not c.tile and _unfit(c),
    example=arguments(w=np.zeros((4, 4), np.float32)),
)
_row(
    "matrices",
    (LINEAR_KERNEL,),
    "x must have shape [N, H] and w [H, V] with V at least 1, got {shape} and "
    "{w_shape}",
    lambda c: not c.tile and (len(c.shape) != 2 or _unfit(c)),
    example=arguments(w=np.zeros((4, 4), np.float32)),
)


def _odd_keep(c: Any) -> str:
    if c.keep is None or getattr(c.keep, "dtype", None) == jnp.dtype(bool):
        return ""
    return str(getattr(c.keep, "dtype", type(c.keep).__name__))


def _odd_lse(c: Any) -> str:
    lse = c.given["lse"]
    return "None" if lse is None else odd_dtype({"one": lse})


def _unfit(c: Any) -> bool:
    ranked = len(c.shape) >= 1 and len(c.w_shape) == 2 and c.w_shape[1] > 0
    return not ranked or c.shape[-1] != c.w_shape[0]


_row(
    "dtype",
    ALL,
    "logits, x and w must be bfloat16, float16, float32 or float64, got {odd}",
    lambda c: not c.tile and c.odd,
    example=arguments(matrix=np.zeros((3, 5), np.int32)),
)
_row(
    "targets",
    ALL,
    "targets must be integers, got {targets_dtype}",
    lambda c: (
        not c.tile
        and (
            c.targets_dtype is None or not jnp.issubdtype(c.targets_dtype, jnp.integer)
        )
    ),
    example=arguments(targets=np.zeros(3, np.float32)),
)
_row(
    "shape",
    ALL,
    "every token has one entry, shape {tokens}, got {odd_shape}",
    lambda c: not c.tile and c.odd_shape,
    example=arguments(targets=np.zeros(2, np.int32)),
)
_row(
    "inside",
    ALL,
    "targets must lie in [0, {whole}), the classes, got {outside}",
    told("outside", odd_target),
    example=arguments(targets=np.array([0, 1, 9], np.int32)),
    stage=2,
)
_row(
    "lse",
    BACKWARDS,
    "the log-sum-exp must be an array of bfloat16, float16, float32 or float64, got "
    "{odd_lse}",
    told("odd_lse", _odd_lse),
    example=arguments(lse=np.zeros(3, np.int32)),
)
_row(
    "keep",
    KERNELS,
    "keep must be bool, got {odd_keep}",
    told("odd_keep", _odd_keep),
    example=arguments(keep=np.ones(3, np.float32)),
)
_row(
    "result_dtype",
    (*PEERS, *KERNELS),
    "dtype must be bfloat16, float16, float32 or float64, got {dtype}",
    # NumPy takes None for float64: `None in FLOATS`.
    lambda c: (
        c.dtype is not None
        and (named_dtype(c.dtype) is None or named_dtype(c.dtype) not in FLOATS)
    ),
    example=arguments(dtype="int32"),
)
_row(
    "chunk",
    (*PEERS, *KERNELS),
    "chunk_size must be a positive integer, known while tracing, got {chunk_size}",
    lambda c: (
        not is_count(c.chunk_size) and (c.chunk_size is not None or c.function in PEERS)
    ),
    example=arguments(chunk_size=0),
)
_row(
    "positions",
    PEERS,
    "positions_per_batch must be a positive integer, known while tracing, got "
    "{positions_per_batch}",
    lambda c: not is_count(c.positions_per_batch),
    example=arguments(positions_per_batch=0),
)
_row(
    "reduction",
    PUBLIC,
    f"reduction must be one of {', '.join(REDUCTIONS)}, got {{reduction!r}}",
    lambda c: c.reduction not in REDUCTIONS,
    example=arguments(reduction="median"),
)
_row(
    "backward_reduction",
    BACKWARDS,
    f"reduction must be one of {', '.join(BACKWARD_REDUCTIONS)}, got {{reduction!r}}",
    lambda c: c.reduction not in BACKWARD_REDUCTIONS,
    example=arguments(reduction="none"),
)
_row(
    "inplace",
    BACKWARDS,
    "inplace must be True or False, got {inplace!r}",
    lambda c: not is_flag(c.inplace),
    example=arguments(inplace=None),
)
_row(
    "ignore_index",
    PUBLIC,
    "ignore_index must be an integer or None, known while tracing, got {ignore_index}",
    lambda c: c.ignore_index is not None and not is_count(c.ignore_index, -(2**63)),
    example=arguments(ignore_index=0.5),
)
_row(
    "smoothing",
    PUBLIC,
    "label_smoothing must be a number from 0 to 1, known while tracing, got "
    "{label_smoothing}",
    lambda c: not is_fraction(c.label_smoothing),
    example=arguments(label_smoothing=1.5),
)
_row(
    "z_loss",
    (*PUBLIC, LINEAR_KERNEL),
    "z_loss must be a finite number of at least 0, known while tracing, got {z_loss}",
    lambda c: not is_gain(c.z_loss),
    example=arguments(z_loss=-1.0),
)
_row(
    "kernel_smoothing",
    (*KERNELS, LINEAR_KERNEL),
    "smoothing must be a number from 0 to 1, known while tracing, got {smoothing}",
    lambda c: not is_fraction(c.smoothing),
    example=arguments(smoothing=1.5),
)
_row(
    "part_of",
    (*KERNELS, LINEAR_KERNEL),
    "part_of must be None or the size of the whole vocabulary, at least the {vocab} "
    "columns here, got {part_of}",
    lambda c: c.part_of is not None and not is_count(c.part_of, max(c.vocab, 1)),
    example=arguments(part_of=3),
)
_row(
    "part_total",
    (LINEAR_KERNEL,),
    "a part of the vocabulary has no loss of its own: coefficients must be None",
    lambda c: c.part_of is not None and c.coefficients is not None,
    example=arguments(part_of=9),
)
_row(
    "token_z_loss",
    (LINEAR_KERNEL,),
    "z_loss is a part of the weighted sum: without coefficients it must be 0",
    lambda c: is_gain(c.z_loss) and c.z_loss and c.coefficients is None,
    example=arguments(coefficients=None, z_loss=0.5),
)
_row(
    "weights",
    PUBLIC,
    "weights must be bfloat16, float16, float32 or float64, got {weights.dtype}",
    lambda c: c.weights is not None and getattr(c.weights, "dtype", None) not in FLOATS,
    example=arguments(weights=np.ones(3, np.int32)),
)
_row(
    "block_size",
    ON_FACTORS,
    "block_size must be None or a positive integer, known while tracing, got "
    "{block_size}",
    lambda c: c.block_size is not None and not is_count(c.block_size),
    example=arguments(block_size=0),
)
_row(
    "axis",
    PUBLIC,
    "axis must be None or the name of a mesh axis, got {axis!r}",
    lambda c: c.axis is not None and not isinstance(c.axis, str),
    example=arguments(axis=0),
)
_row(
    "chip_dtype",
    (*PEERS, *KERNELS),
    "the chip takes logits in bfloat16 or float32, got {given[logits].dtype}",
    lambda c: not c.odd and c.given["logits"].dtype not in _CHIP,
    example=arguments(matrix=np.zeros((3, 5), np.float16)),
    tag="hw",
    stage=3,
)
_row(
    "chip_targets",
    ALL,
    "the chip takes int32 targets, got {targets_dtype}",
    lambda c: c.targets_dtype != jnp.dtype(jnp.int32),
    example=arguments(targets=np.zeros(3, np.int8)),
    tag="hw",
    stage=3,
)
_row(
    "chip_chunk",
    PEERS,
    "the chip takes chunks of up to 65536 columns and no more than V, got {chunk_size}",
    lambda c: (c.chunk_size or c.vocab) > min(c.vocab, 65536),
    example=arguments(chunk_size=6),
    tag="hw",
    stage=3,
)
_row(
    "chip_positions",
    PEERS,
    "the chip takes up to 128 positions at a time, got {positions_per_batch}",
    size=Size("positions_per_batch", lambda c: int(c.positions_per_batch), maximum=128),
    example=arguments(positions_per_batch=129),
    tag="hw",
    stage=3,
)
_row(
    "chip_bytes",
    PEERS,
    f"positions_per_batch * chunk_size * dtype must fit in {CHIP_BYTES} bytes on the "
    "chip, got {chunk_bytes}",
    lambda c: c.chunk_bytes > CHIP_BYTES,
    example=arguments(positions_per_batch=128, chunk_size=65536, dtype="float32"),
    tag="hw",
    stage=3,
)
