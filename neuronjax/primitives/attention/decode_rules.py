"""What the emitter `attention_tkg_fwd_kernel` refuses."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives.attention.decode_facts import is_integer, is_mask
from neuronjax.primitives.attention.operand_kinds import not_array
from neuronjax.primitives.contracts import (
    Contract,
    Size,
    add,
    all_or_none_tiles,
    told,
)
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.tile import MemrefTile

# Which axis of each tensor a tile lies on; the keys' is the head dimension.
AXES = dict(q=3, k_active=3, v_active=2, k_prior=2, v_prior=2, lengths=0)
_FUNCTION = "attention_tkg_fwd_kernel"
_OPTIONAL = "inv_freqs rope_pos_ids start_pos_ids sink active_blocks_table".split()


def _emitter(**changes: Any):
    """Arguments that keep every rule but the one that `changes` break.

    A tuple is a shape.
    """
    shapes: dict[str, tuple] = dict(
        q=(1, 4, 2, 8),
        k_active=(1, 2, 2, 8),
        v_active=(1, 2, 2, 8),
        k_prior=(1, 2, 8, 6),
        v_prior=(1, 2, 6, 8),
    )
    shapes |= {k: v for k, v in changes.items() if isinstance(v, tuple)}
    arrays = {k: np.zeros(v, np.float32) for k, v in shapes.items()}
    rest = {k: v for k, v in changes.items() if not isinstance(v, tuple)}
    return lambda function: {**arrays, "lengths": np.zeros(1, np.int32), **rest}


def _blocks(**changes: Any):
    """The same, over a cache of three blocks of two slots."""
    cache = (3, 2, 2, 8)
    given = dict(k_prior=cache, v_prior=cache, tp_k_prior=True)
    given |= dict(active_blocks_table=np.zeros((1, 3), np.int32))
    return _emitter(**{**given, **changes})


def _tiles() -> dict[str, MemrefTile]:
    arrays = _emitter()("")
    return {
        name: MemrefTile.from_tensor(arrays[name], axis) for name, axis in AXES.items()
    }


def _on_their_axes(call: SimpleNamespace) -> bool:
    tiles = {name: getattr(call, name) for name in AXES}
    # A tensor among tiles is another rule's matter.
    return all(
        not isinstance(t, MemrefTile) or t.axis == AXES[name]
        for name, t in tiles.items()
    )


def _with_options(call: SimpleNamespace) -> bool:
    given = [getattr(call, name) for name in ("mask", "prior_slots", *_OPTIONAL)]
    return any(x is not None for x in given) or call.tp_k_prior


def _row(rule: str, message: str, *args: Any, **kwargs: Any) -> None:
    """Enters a row; its stage is the second unless named."""
    text = "{function}: " + message
    add(Contract(f"{_FUNCTION}.{rule}", (_FUNCTION,), text, *args, **kwargs))


add(
    all_or_none_tiles(
        _FUNCTION,
        (*AXES, "mask", *_OPTIONAL),
        lambda function: dict(
            _emitter()(function),
            q=MemrefTile.from_tensor(np.zeros((1, 4, 2, 8), np.float32), 3),
        ),
    )
)
add(*only_flags(_FUNCTION))
_row(
    "arrays",
    "{not_array}",
    told(
        "not_array",
        lambda c: (
            not_array(c, ("q", "k_prior", "v_prior"), True)
            or not_array(c, (*AXES, "mask", *_OPTIONAL))
        ),
    ),
    example=_emitter(q=None),
    stage=-1,
)
_row(
    "slots_in_use",
    "prior_slots must be an integer of at least 0 or None, known while tracing, got "
    "{prior_slots!r}",
    lambda c: c.prior_slots is not None and not is_count(c.prior_slots, 0),
    example=_emitter(prior_slots=2.5),
    stage=0,
)
_row(
    "tiles",
    "tiles come with lengths and all slots of a flat cache; masks, rotation, windows, "
    "sinks and block tables are for tensors",
    lambda c: isinstance(c.q, MemrefTile) and _with_options(c),
    example=lambda function: dict(_tiles(), prior_slots=3),
    stage=0,
)
_row(
    "tile_axes",
    "tiles must lie on axis 3 of q and k_active, 2 of k_prior, v_active and v_prior, 0 "
    "of lengths",
    lambda c: isinstance(c.q, MemrefTile) and not _on_their_axes(c),
    example=lambda function: dict(
        _tiles(), q=MemrefTile.from_tensor(np.zeros((1, 4, 2, 8), np.float32), 2)
    ),
    stage=0,
)
_row(
    "rank",
    "q, k_prior and v_prior must have 4 axes, got {q.shape}, {k_prior.shape} and "
    "{v_prior.shape}",
    lambda c: {len(x.shape) for x in (c.q, c.k_prior, c.v_prior)} != {4},
    example=_emitter(q=(4, 2, 8)),
    stage=0,
)
_row(
    "pair",
    "k_active and v_active must both be given or both be None",
    lambda c: (c.k_active is None) != (c.v_active is None),
    example=_emitter(v_active=None),
    stage=0,
)
_row(
    "visibility",
    "mask or lengths must be given; both, where mask is that of new tokens",
    lambda c: (
        (c.mask is None and c.lengths is None)
        or (c.mask is not None and c.lengths is not None and c.k_active is None)
    ),
    example=_emitter(lengths=None),
    stage=0,
)
_row(
    "starts",
    "start_pos_ids needs lengths, where the window ends",
    lambda c: c.start_pos_ids is not None and c.lengths is None,
    example=_emitter(
        lengths=None,
        mask=np.ones((8, 1, 4, 2), bool),
        start_pos_ids=np.zeros((1, 2), np.int32),
    ),
    stage=0,
)
_row(
    "rotation",
    "inv_freqs needs rope_pos_ids and k_active, and these need it",
    lambda c: (
        (c.inv_freqs is None) != (c.rope_pos_ids is None)
        or (c.inv_freqs is not None and c.k_active is None)
    ),
    example=_emitter(inv_freqs=np.ones((4, 1), np.float32)),
    stage=0,
)
_row(
    "block_layout",
    "the keys of a block cache are [num_blocks, num_kv_heads, block_len, d]: "
    "tp_k_prior must be True, got False",
    lambda c: c.active_blocks_table is not None and not c.tp_k_prior,
    example=_blocks(tp_k_prior=False),
    stage=0,
)
_row(
    "table",
    "active_blocks_table must be integers of shape [{batch}, blocks], got "
    "{active_blocks_table.dtype} {active_blocks_table.shape}",
    lambda c: (
        c.active_blocks_table is not None
        and not (
            is_integer(c.active_blocks_table)
            and len(c.active_blocks_table.shape) == 2
            and c.active_blocks_table.shape[0] == c.batch
        )
    ),
    example=_blocks(active_blocks_table=np.zeros(3, np.int32)),
)
_row(
    "block_number",
    "active_blocks_table must hold blocks in [0, {num_blocks}), or -1 for none, got "
    "{wrong_block}",
    lambda c: c.wrong_block is not None,
    example=_blocks(active_blocks_table=np.array([[0, 3, -1]], np.int32)),
)
_row(
    "heads",
    "num_heads of q must be a multiple of num_kv_heads of v_prior, got {num_heads} and "
    "{num_kv_heads}",
    lambda c: c.num_heads % c.num_kv_heads != 0,
    example=_emitter(q=(1, 3, 2, 8)),
)
_row(
    "cache",
    "k_prior must have shape [at least {rows}, {num_kv_heads}, *{keys}] and v_prior as "
    "many rows, got {k_prior.shape} and {v_prior.shape}",
    lambda c: (
        tuple(c.k_prior.shape[2:]) != c.keys
        or c.k_prior.shape[:2] != c.v_prior.shape[:2]
        or c.k_prior.shape[0] < c.rows
    ),
    example=_emitter(k_prior=(1, 2, 7, 6)),
)
_row(
    "active",
    "k_active must have shape [{batch}, {num_kv_heads}, {seq}, {d}] and v_active the "
    "same but for its width, that of v_prior, got {k_active.shape} and "
    "{v_active.shape}",
    lambda c: (
        c.k_active is not None
        and (
            tuple(c.k_active.shape) != (c.batch, c.num_kv_heads, c.seq, c.d)
            or tuple(c.v_active.shape)
            != (c.batch, c.num_kv_heads, c.seq, c.v_prior.shape[3])
        )
    ),
    example=_emitter(k_active=(1, 2, 3, 8)),
)
_row(
    "prior_slots",
    "prior_slots must lie in [0, {slots}], got {count}",
    lambda c: not 0 <= c.count <= c.slots,
    example=_emitter(prior_slots=7),
)
_row(
    "mask_shape",
    "mask must have shape {mask_shape}, got {mask.shape}",
    lambda c: c.mask is not None and tuple(c.mask.shape) != c.mask_shape,
    example=_emitter(lengths=None, mask=np.ones((6, 1, 4, 2), bool)),
)
_row(
    "mask_dtype",
    "mask must be boolean or integer, nonzero = attend, got {mask.dtype}: an additive "
    "mask would be read upside down",
    lambda c: not is_mask(c.mask),
    example=_emitter(lengths=None, mask=np.zeros((8, 1, 4, 2), np.float32)),
)
_row(
    "lengths_shape",
    "lengths must be integers of shape ({batch},) or ({batch}, {seq}), got "
    "{lengths.dtype} {lengths.shape}",
    lambda c: (
        c.lengths is not None
        and (
            tuple(c.lengths.shape) not in ((c.batch,), (c.batch, c.seq))
            or not is_integer(c.lengths)
        )
    ),
    example=_emitter(lengths=np.zeros(1, np.float32)),
)
_row(
    "lengths",
    "lengths must lie in [0, {slots}], the slots of a sequence, got {wrong_length}",
    lambda c: c.wrong_length is not None,
    example=_emitter(lengths=np.full(1, 7, np.int32)),
)
_row(
    "starts_shape",
    "start_pos_ids must be integers of shape ({batch}, {seq}), got "
    "{start_pos_ids.dtype} {start_pos_ids.shape}",
    lambda c: (
        c.start_pos_ids is not None
        and (
            tuple(c.start_pos_ids.shape) != (c.batch, c.seq)
            or not is_integer(c.start_pos_ids)
        )
    ),
    example=_emitter(start_pos_ids=np.zeros((1, 1), np.int32)),
)
_row(
    "sink_shape",
    "sink must have shape ({num_heads}, 1), got {sink.shape}",
    lambda c: c.sink is not None and tuple(c.sink.shape) != (c.num_heads, 1),
    example=_emitter(sink=(4,)),
)
_row(
    "dtypes",
    "q and sink must be bfloat16, float16, float32 or float64, keys and values these "
    "or float8_e4m3, got {odd}",
    lambda c: bool(c.odd),
    example=_emitter(v_prior=np.zeros((1, 2, 6, 8), np.int8)),
)
_row(
    "fp8_together",
    "k_active, v_active, k_prior and v_prior must be float8_e4m3 together: a cache "
    "holds scaled values, got it in {fp8_mixed} alone",
    lambda c: bool(c.fp8_mixed),
    example=_emitter(v_prior=np.zeros((1, 2, 6, 8), E4M3)),
)
_row(
    "fp8_rotation",
    "inv_freqs rotates no fp8 keys: the result would have to be rounded again",
    lambda c: c.fp8 and c.inv_freqs is not None,
    example=lambda function: {
        **_emitter()(function),
        **{
            name: _emitter()(function)[name].astype(E4M3)
            for name in ("k_active", "v_active", "k_prior", "v_prior")
        },
        "inv_freqs": np.ones((4, 1), np.float32),
        "rope_pos_ids": np.zeros((1, 2), np.int32),
    },
)
_row(
    "head_dim",
    "the chip takes d of at most 128, got {value}",
    size=Size("d", lambda c: c.d, maximum=128),
    example=_emitter(q=(1, 4, 2, 130), k_active=(1, 2, 2, 130), k_prior=(1, 2, 130, 6)),
    tag="hw",
)
