"""The rules of prefill attention: for `attention_cte` and `attention_kernel` alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from neuronjax.primitives.attention.operand_kinds import (
    is_mask,
    is_wide_float,
    not_array,
)
from neuronjax.primitives.contracts import Contract, Size, add, all_or_none_tiles
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import is_count, is_number
from neuronjax.primitives.tile import MemrefTile

CTE, KERNEL = "attention_cte", "attention_kernel"
BOTH = (CTE, KERNEL)
REACH = 131072  # positions that the chip addresses
TILED_STATISTICS = (
    "Softmax caching not supported yet for tiled attention_kernel. Pass in tensors "
    "instead of tiles."
)
# Of operands that an example gives as a shape; the others are float32.
_DTYPES = dict(prior_used_len=np.int32, cp_offset=np.int32)
_ARRAYS = ("mask", "active_mask", "sink", "out", "attn_out")
UNIT_SCALE = "{name} only supports scale equal to 1.0"


def arguments(tiles: bool = False, **changes: Any):
    """Arguments that keep the rules but for `changes`; a tuple is a shape of zeros."""

    def build(function: str) -> dict[str, Any]:
        shapes: dict[str, Any] = dict(q=(4, 3, 8), k=(2, 8, 5), v=(2, 5, 6))
        given = shapes | {"tp_q": True} | changes
        arrays: dict[str, Any] = {
            key: np.zeros(value, np.float32) if isinstance(value, tuple) else value
            for key, value in given.items()
        }
        for name, dtype in _DTYPES.items():
            if isinstance(given.get(name), tuple):
                arrays[name] = np.zeros(given[name], dtype)
        if tiles:
            for key, axis in dict(q=2, k=1, v=1).items():
                arrays[key] = MemrefTile.from_tensor(arrays[key], axis)
        return arrays

    return build


def _symbolic() -> jax.ShapeDtypeStruct:
    shape = export.symbolic_shape("4, s, 8")
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _mixed(function: str) -> dict[str, Any]:
    given = arguments()(function)
    return dict(given, q=MemrefTile.from_tensor(given["q"], 2))


def row(rule: str, message: str, violated=None, functions=BOTH, **kwargs) -> None:
    """Enters the rule `attention.<rule>`."""
    add(
        Contract(
            f"attention.{rule}", functions, "{function}: " + message, violated, **kwargs
        )
    )


def _heads_misfit(heads: int, q_head: int | None, batch_size: int | None) -> bool:
    if not all(x is None or is_count(x) for x in (q_head, batch_size)):
        return True
    if q_head is None or batch_size is None:
        return heads % (q_head or batch_size or 1) != 0
    return q_head * batch_size != heads


add(*only_flags(KERNEL))
for _function in BOTH:
    add(all_or_none_tiles(_function, ("q", "k", "v"), _mixed))
add(
    Contract(
        "attention.tiled_statistics",
        BOTH,
        TILED_STATISTICS,
        lambda c: c.cache_softmax and isinstance(c.q, MemrefTile),
        example=arguments(tiles=True, cache_softmax=True),
        stage=0,
        literal=True,
    ),
    Contract(
        "attention.unit_scale",
        (KERNEL,),
        UNIT_SCALE,
        lambda c: c.is_causal and not c.tiled and c.one_scale != 1.0,
        example=arguments(is_causal=True, scale=0.5),
        literal=True,
    ),
)
row(
    "operands",
    "{not_operand}",
    lambda c: vars(c).setdefault("not_operand", not_array(c, ("q", "k", "v"), True)),
    example=arguments(q=None),
    stage=-1,
)
row(
    "rank",
    "q, k and v must have 3 axes, heads first, got {q.shape}, {k.shape} and {v.shape}",
    lambda c: {len(x.shape) for x in (c.q, c.k, c.v)} != {3},
    example=arguments(q=(1, 4, 3, 8)),
    stage=0,
)
row(
    "dtypes",
    "q, k and v must have one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}",
    lambda c: (
        len({c.q.dtype, c.k.dtype, c.v.dtype}) != 1
        or not jnp.issubdtype(c.q.dtype, jnp.floating)
        or jnp.dtype(c.q.dtype).itemsize < 2
    ),
    example=arguments(v=np.zeros((2, 5, 6), jnp.bfloat16)),
    stage=0,
)
row(
    "empty",
    "no axis of q, k and v may be empty, got {q.shape}, {k.shape} and {v.shape}",
    lambda c: any(0 in x.shape for x in (c.q, c.k, c.v)),
    example=arguments(q=(4, 0, 8)),
    stage=0,
)
row(
    "group",
    "heads of q must be a multiple of those of k, got {heads} and {kv_heads}",
    lambda c: c.heads % c.kv_heads != 0,
    example=arguments(q=(3, 3, 8)),
)
row(
    "head_dim",
    "q and k must have one head dimension, got {d} and {k_width} from {q.shape} and "
    "{k.shape} with tp_q = {tp_q} and tp_k = {tp_k}",
    lambda c: c.d != c.k_width,
    example=arguments(k=(2, 7, 5)),
)
row(
    "values",
    "v must have shape [{kv_heads}, {kv_seq}, value_dim], got {v.shape}",
    lambda c: tuple(c.v.shape[:2]) != (c.kv_heads, c.kv_seq),
    example=arguments(v=(2, 4, 6)),
)
row(
    "fixed_lengths",
    "q_seq and kv_seq must be known while tracing, since keys are cut into blocks, got "
    "{q_seq} and {kv_seq}: export once for each length, the heads may be symbolic",
    lambda c: not all(isinstance(n, int) for n in (c.q_seq, c.kv_seq)),
    example=lambda function: arguments(q=_symbolic())(function),
)
row(
    "tile_axes",
    "{off_axis}",
    lambda c: c.off_axis,
    example=lambda function: dict(
        arguments(tiles=True)(function),
        v=MemrefTile.from_tensor(np.zeros((2, 5, 6), np.float32), 2),
    ),
)
row(
    "scale",
    "scale must be a number, a scalar array or None, got shape {scale.shape}",
    lambda c: getattr(c.scale, "shape", ()) != (),
    (CTE,),
    example=arguments(scale=np.ones(2, np.float32)),
)
row(
    "swapped_causal",
    "the causal form has no swapped variant: k must be [kv_heads, d, kv_seq], got "
    "tp_k = True",
    lambda c: c.is_causal and c.tp_k and not c.tiled,
    (KERNEL,),
    example=arguments(is_causal=True, tp_k=True, k=(2, 5, 8)),
)
row(
    "swapped_query",
    "the swapped form takes q as [heads, d, q_seq], got tp_q = True with tp_k = True",
    lambda c: c.tp_q and c.tp_k and not c.is_causal and not c.tiled,
    (KERNEL,),
    example=arguments(tp_k=True, k=(2, 5, 8)),
)
row(
    "one_word",
    "{twice} are two words for one argument: give one of them",
    lambda c: c.twice,
    (KERNEL,),
    example=arguments(scale=1.0, softmax_scale=1.0),
)
row(
    "mask_shape",
    "mask must have shape [1 or {heads}, 1 or {q_seq}, 1 or {kv_seq}], got "
    "{one_mask.shape}",
    lambda c: c.mask_misfit,
    (KERNEL,),
    example=arguments(mask=(5,)),
)
row(
    "mask_dtype",
    "mask must be boolean or integer, got {one_mask.dtype}: attention_cte takes an "
    "additive bias and has its gradient",
    lambda c: not is_mask(c.one_mask),
    (KERNEL,),
    example=arguments(mask=(1, 1, 5)),
)
row(
    "tiled_options",
    "tiles take no mask and no sink: pass tensors",
    lambda c: c.tiled and (c.one_mask is not None or c.sink is not None),
    (KERNEL,),
    example=arguments(tiles=True, mask=(1, 1, 5)),
)
row(
    "kernel_sink",
    "{misfit}",
    lambda c: c.misfit,
    (KERNEL,),
    example=arguments(sink=(3, 1)),
)
row(
    "kernel_sink_dtype",
    "sink must have a floating dtype, got {sink.dtype}",
    lambda c: not is_wide_float(c.sink),
    (KERNEL,),
    example=arguments(sink=np.zeros((4, 1), np.int32)),
)
row(
    "kernel_scale",
    "scale must be a finite number that is known while tracing, got {one_scale!r}",
    lambda c: not is_number(c.one_scale) or not np.isfinite(c.one_scale),
    (KERNEL,),
    example=arguments(scale="2"),
)
row(
    "kernel_arrays",
    "{not_array}",
    lambda c: vars(c).setdefault("not_array", not_array(c, _ARRAYS)),
    (KERNEL,),
    example=arguments(sink=[0.0] * 4),
    stage=-1,
)
row(
    "foreign_operand",
    "{foreign}, not of this one",
    lambda c: c.foreign,
    (KERNEL,),
    example=arguments(k_active=(2, 1, 8)),
)
row(
    "kernel_dropout",
    "dropout_prob must be 0: attention_cte has dropout, got {dropout_prob}",
    lambda c: c.dropout_prob != 0,
    (KERNEL,),
    example=arguments(dropout_prob=0.1),
)
row(
    "destination",
    "the destination must have shape {out_shape} and a floating dtype, got "
    "{destination.shape} {destination.dtype}",
    lambda c: (
        c.destination is not None
        and (
            tuple(c.destination.shape) != c.out_shape
            or not jnp.issubdtype(c.destination.dtype, jnp.floating)
        )
    ),
    (KERNEL,),
    example=arguments(out=(4, 3, 5)),
)
row(
    "destination_kind",
    "the destination must be a tile exactly when q is one",
    lambda c: (
        c.destination is not None and isinstance(c.destination, MemrefTile) != c.tiled
    ),
    (KERNEL,),
    example=arguments(tiles=True, out=(4, 3, 6)),
)
row(
    "batch",
    "heads of q must be q_head times batch_size, integers of at least 1, got {heads} "
    "with {q_head} and {batch_size}",
    lambda c: _heads_misfit(c.heads, c.q_head, c.batch_size),
    (KERNEL,),
    example=arguments(q_head=3, batch_size=2),
)
row(
    "fuse_batches",
    "fuse_batches is a hint for tiles alone, got {fuse_batches}",
    lambda c: bool(c.fuse_batches) and not c.tiled,
    (KERNEL,),
    example=arguments(fuse_batches=True),
)
row(
    "chip_head_dim",
    "the chip takes d of at most 128, got {value}",
    size=Size("d", lambda c: c.d, maximum=128),
    example=arguments(q=(4, 3, 130), k=(2, 130, 5)),
    tag="hw",
)
row(
    "chip_heads",
    "the chip takes at most 512 heads with the batch, got {value}",
    size=Size("heads", lambda c: c.heads, maximum=512),
    example=arguments(q=(514, 1, 1), k=(1, 1, 1), v=(1, 1, 1)),
    tag="hw",
)
row(
    "chip_q_seq",
    "the chip takes q_seq of at most 131072, got {value}",
    size=Size("q_seq", lambda c: c.q_seq, maximum=REACH),
    example=arguments(q=(1, REACH + 1, 1), k=(1, 1, 1), v=(1, 1, 1)),
    tag="hw",
)
row(
    "chip_kv_seq",
    "the chip takes kv_seq of at most 131072, got {value}",
    size=Size("kv_seq", lambda c: c.kv_seq, maximum=REACH),
    example=arguments(q=(1, 1, 1), k=(1, 1, REACH + 1), v=(1, REACH + 1, 1)),
    tag="hw",
)
row(
    "chip_statistics",
    "the chip caches the softmax for q_seq in multiples of 128, got {q_seq}",
    lambda c: c.cache_softmax and c.q_seq % 128 != 0,
    example=arguments(cache_softmax=True),
    tag="hw",
)
