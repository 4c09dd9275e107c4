"""Feed-forward experts of a decode step, on the block loop of `blockwise_mm`.

    y_e = (act(clamp(x @ gate_e + gate_b_e)) * clamp(x @ up_e + up_b_e)) @ down_e + b_e

    all experts    out[t] = sum over local e of a[t, e] * y_e(x_t)
    selective      out[t] = sum over k of a[t, index[t, k]] * y_{index[t, k]}(x_t)

aws-neuron/nki-library, `core/moe/moe_tkg`. Without scaling every `a` is 1. Sums are
float32, or float64 where an operand is, and rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.blockwise_mm import forward
from neuronjax.kernels.blockwise_mm import operands as blocks
from neuronjax.kernels.blockwise_mm.slots import slots_of
from neuronjax.kernels.expert_mlps.operands import Operands, Options
from neuronjax.kernels.expert_mlps.pairs import (
    Blocks,
    active_pairs,
    all_pairs,
    block_size_of,
    local_affinities,
    local_index,
    sorted_pairs,
)
from neuronjax.kernels.expert_mlps.quantized_hidden import Rounded, rows_of
from neuronjax.kernels.expert_mlps.tiled import Slots, tiled_blocks
from neuronjax.kernels.expert_mlps.tiles import on_tokens
from neuronjax.kernels.shard_common import uniform

_SHARED = ("activation", "scaling", "quantization", "weight_format")
_LIMITS = tuple(
    f"{side}_clamp_{end}_limit" for side in ("gate", "up") for end in ("upper", "lower")
)


def expert_mlps_fwd(*operands: Any, name: str, **config: Any) -> tuple[jax.Array]:
    """Returns `(out [T, H],)`, in `out_dtype` or the dtype of `hidden`."""
    return _run(Operands(*operands), Options.of(config), is_static=False)


def expert_mlps_static(*operands: Any, name: str, **config: Any) -> tuple[jax.Array]:
    """`expert_mlps_fwd` with static loop bounds.

    No token is left out: one of affinity 0 has a derivative.
    """
    opts = Options.of(config)._replace(block_size=None)
    return _run(Operands(*operands), opts, is_static=True)


def _run(ops: Operands, opts: Options, *, is_static: bool) -> tuple[jax.Array]:
    if opts.is_tiled:
        out = _run_tiled(ops, opts, is_static)
        return (out.astype(opts.out_dtype or ops.hidden.dtype),)
    of_blocks, config = block_operands(ops, opts)
    bag = blocks.Options.of(config)
    if ops.hidden_scale is None:
        (out,) = forward.run_blocks(of_blocks, bag, is_static=is_static)
    else:
        out = _run_rounded(of_blocks, bag, is_static)
    return (out.astype(opts.out_dtype or ops.hidden.dtype),)


def _run_tiled(ops: Operands, opts: Options, is_static: bool) -> jax.Array:
    rows, num_experts = on_tokens(ops), ops.gate_up_w.shape[2]
    tokens = ops.hidden.shape[2]
    table = local_affinities(rows, opts, num_experts) if opts.is_scaled else None
    (token_id, expert), size = _blocks(rows, opts, table, tokens, num_experts)
    token = token_id.reshape(-1, size)
    token = jnp.where(token < 0, tokens, token)
    affinity = None
    if table is not None:
        affinity = table.at[token, expert[:, None]].get(mode="fill", fill_value=0)
    bag = blocks.Options.of(_config(opts, size))
    slots = Slots(token, affinity, expert)
    return tiled_blocks(ops, slots, bag, is_static=is_static)


def _run_rounded(
    ops: blocks.Operands, bag: blocks.Options, is_static: bool
) -> jax.Array:
    experts = Rounded(ops, bag)
    slots = slots_of(ops, bag, experts.acc)
    run = forward.expert_blocks_static if is_static else forward.expert_blocks_fwd
    return run(ops.hidden, slots, experts, bag)[0]


def block_operands(
    ops: Operands, opts: Options
) -> tuple[blocks.Operands, dict[str, Any]]:
    """The operands and the config with which `BlockwiseMM` computes the same."""
    if ops.hidden_scale is not None:
        ops = ops._replace(hidden=rows_of(ops))
    tokens, num_experts = ops.hidden.shape[0], ops.gate_up_w.shape[0]
    scaled = local_affinities(ops, opts, num_experts) if opts.is_scaled else None
    (token_id, block_expert), size = _blocks(ops, opts, scaled, tokens, num_experts)
    table = scaled
    if table is None:  # it is not read
        table = jnp.zeros((tokens, num_experts), jnp.float32)
        table = uniform(table, ops.hidden)[0]
    found = blocks.Operands(
        hidden=ops.hidden,
        affinity=table.reshape(tokens * num_experts, 1),
        gate_up_w=ops.gate_up_w,
        down_w=ops.down_w,
        token_id=token_id,
        block_expert=block_expert,
        gate_up_b=ops.gate_up_b,
        down_b=ops.down_b,
        gate_up_scale=_scale_row(ops.gate_up_scale, opts),
        down_scale=_scale_row(ops.down_scale, opts),
    )
    return found, _config(opts, size)


def _config(opts: Options, block_size: Any) -> dict[str, Any]:
    """The config bag of `BlockwiseMM`."""
    config = {key: getattr(opts, key) for key in (*_SHARED, *_LIMITS)}
    # Nothing is stored for the backward: the time of a decode step is its own.
    return config | dict(
        block_size=block_size, skip_token=True, checkpoint="recompute", returned=False
    )


def _blocks(
    ops: Operands, opts: Options, table: Any, tokens: Any, num_experts: int
) -> tuple[Blocks, Any]:
    """The blocks, and how many slots each has; `table` is None without scaling."""
    if not opts.all_experts:
        size = block_size_of(tokens, ops.index.shape[1], num_experts)
        return sorted_pairs(local_index(ops, num_experts), num_experts, size), size
    if opts.block_size is None or table is None:
        return all_pairs(num_experts, tokens), tokens
    return active_pairs(table != 0, opts.block_size), opts.block_size


def _scale_row(scale: Any, opts: Options) -> Any:
    """The scales of an expert's columns as one row, `[E, 1, columns]`."""
    if scale is None or opts.quantization != "ROW":
        return scale
    return scale.reshape(scale.shape[0], 1, -1)
