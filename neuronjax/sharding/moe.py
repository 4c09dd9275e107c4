"""Blockwise experts over the cores of one logical core, forwards and backwards.

Cores can divide the blocks, or the weights, along `I` or along `H`; which changes
rounding alone.

What crosses the wire, forward. `"block"`: one all-reduce of the output, at the end.
`"intermediate"`: one of each block's result. `"hidden"`: one of each block's gate and
up, before bias and activation.

Backward. `"block"`: all-reduces of what every core holds whole, the gradients of
tokens, affinities and weights, at the end. `"intermediate"`: one of the gradient of
tokens, at the end. `"hidden"`: one of each block, of dM and of the affinities' gradient
together. The affinities' gradient is a part of a sum, added at the end, where they
multiply before what is divided: PRE_SCALE, or on `I` that is divided. To recompute
repeats the forward's. From stored activations, where operands are whole and each core
computes its own columns: none.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from neuronjax.kernels.blockwise_mm.operands import Operands, Options, sum_dtype
from neuronjax.kernels.blockwise_mm.slots import slots_of
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.blockwise_mm import emitter
from neuronjax.primitives.blockwise_mm.cte_rules import returned
from neuronjax.primitives.blockwise_mm.functions_bwd import (
    backward_of,
    in_given_dtypes,
)
from neuronjax.primitives.blockwise_mm.macro import blockwise_mm
from neuronjax.primitives.blockwise_mm.macro import blockwise_mm_bwd as backward_macro
from neuronjax.primitives.blockwise_mm.names import BACKWARD, FORWARD
from neuronjax.primitives.blockwise_mm.spec import MoECTESpec
from neuronjax.sharding.mesh import laid
from neuronjax.sharding.moe_operands import (
    BLOCK_SCALED,
    COLUMN_GRADS,
    DENSE,
    call_of,
    lies,
    require_multiple,
)

_FORWARD, _BACKWARD = "sharded_moe_cte", "sharded_blockwise_mm_bwd"
_SPECS = dict(block="shard_on_block", intermediate="shard_on_i", hidden="shard_on_i")
_OPERANDS = dict(replicated="columns", hidden="hidden", intermediate="intermediate")
_STORED = ("gate_up", "down")


def sharded_moe_cte(
    mesh: Mesh,
    hidden_states: Float[Array, "rows d_model"],
    expert_affinities_masked: Float[Array, "rows_experts 1"],
    gate_up_proj_weight: Shaped[Array, "num_experts ..."],
    down_proj_weight: Shaped[Array, "num_experts ..."],
    token_position_to_id: Int[Array, " slots"],
    block_to_expert: Int[Array, "..."] | None,
    block_size: int,
    spec: Any = None,
    *,
    lnc: str = "lnc",
    shard_on: str = "block",
    **options: Any,
) -> Array | tuple[Array, ...]:
    r"""`moe_cte` with its blocks, or its weights, divided over one axis of `mesh`.

    With the equation of `moe_cte` and cores `c` that have a part `N_c` of the blocks, a
    part `I_c` of the intermediate axis, or a part `H_c` of the hidden one:

    $$\mathrm{out}_t = \sum_c \sum_{b \in N_c} a_{tb} y_{tb}, \qquad
      y_b = \sum_c \left(\mathrm{act}(g_b) \cdot u_b\right)_{I_c} W^{down}_{I_c},
      \qquad [g_b, u_b] = \sum_c x_{b, H_c} W^{gate, up}_{H_c}$$

    Args:
        mesh: the devices.
        hidden_states: `[rows, H]`, as in `moe_cte`; so are all others.
        expert_affinities_masked: `[rows * E, 1]`.
        gate_up_proj_weight: `[E, H, 2, I]`, or containers.
        down_proj_weight: `[E, I, H]`, or containers.
        token_position_to_id: `[N * B]`.
        block_to_expert: `[N]` or `[N, 1]`.
        block_size: `B`.
        spec: a `MoECTESpec` or an implementation; it says what is computed and
            returned. None for `shard_on_block`, or `shard_on_i` for the others. Its
            `block_sharding_strategy` deals blocks to cores: `PING_PONG` in turn,
            `HI_LO` in contiguous parts; empty blocks fill up the last round.
        lnc: the mesh axis of the cores.
        shard_on: what they divide. `"block"`: the blocks, with one all-reduce of the
            output; all operands are whole on every core. `"intermediate"`: `I`, that of
            both weights, of the bias and the scale of gate and up, with one all-reduce
            a block. `"hidden"`: `H`, that of tokens, both weights, the bias and the
            scale of down, and the output, with one all-reduce a block.
        **options: further arguments of `moe_cte`, by name.

    Returns:
        What `moe_cte` returns. The output is whole on every core, with `"hidden"`
        split along `H`. With `"block"` each core's part is rounded to its dtype before
        they are added. Stored activations are split by block, along `I`, or along `H`
        (down); those of `PING_PONG` in an order that a reader has to gather. By block
        on an explicit mesh they are whole.

    Raises:
        ValueError: the mesh lacks the axis; its cores cannot share `I` or `H` evenly;
            block-scaled weights would be divided along `H`, whose columns they
            interleave, or along `I` otherwise than by 512; or an argument breaks a rule
            of `moe_cte`.

    Source:
        aws-neuron/nki-library, `core/moe/moe_cte`, its kernels `shard_on_block`,
        `shard_on_i` and `blockwise_mm_baseline_shard_hidden`.

    Example:
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> h, affinity = jnp.ones((2, 4)), jnp.array([[1.0], [0.0]])
        >>> w, ids = (jnp.ones((1, 4, 2, 4)), jnp.ones((1, 4, 4))), jnp.array([0, 1])
        >>> out = sharded_moe_cte(
        ...     make_mesh(lnc=1, data=1), h, affinity, *w, ids, jnp.array([0]), 2,
        ...     lnc="data",
        ... )
        >>> out[:, 0].round(1)
        Array([62.8,  0. ], dtype=float32)
    """
    if shard_on not in _SPECS:
        raise ValueError(
            f"{_FORWARD}: shard_on must be one of {', '.join(_SPECS)}, got {shard_on!r}"
        )
    given = dict(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        block_size=block_size,
        spec=MoECTESpec(_SPECS[shard_on]) if spec is None else spec,
        **options,
    )
    call = call_of(_FORWARD, "moe_cte", mesh, lnc, given)
    ops, config = emitter.operands(call), emitter.config_of(call)
    config["returned"] = any(returned(call))
    if shard_on == "block":
        out, *stored = _by_block(mesh, lnc, ops, config)
    else:
        out, *stored = _by_weight(mesh, lnc, shard_on, ops, config)
    kept = [x for x, wanted in zip(stored, returned(call), strict=False) if wanted]
    return (out, *kept) if kept else out


def _by_weight(
    mesh: Mesh, lnc: str, shard: str, ops: Operands, config: dict[str, Any]
) -> tuple[Array, ...]:
    """Each core has its part of every weight."""
    axes = _axes(_FORWARD, mesh, lnc, shard, ops, config["quantization"])
    # The scales of gate and up stand behind each other: each is split.
    is_row = config["quantization"] == "ROW"
    if is_row:
        scale = laid(mesh, ops.gate_up_scale, P())
        ops = ops._replace(gate_up_scale=scale.reshape(*scale.shape[:2], 2, -1))
    split = Operands._make(lies(axes, role, lnc) for role in ops._fields)

    def local(ops: Operands) -> tuple[Array, ...]:
        if is_row:
            scale = ops.gate_up_scale
            ops = ops._replace(gate_up_scale=lax.collapse(scale, 2))
        return blockwise_mm(*ops, name=FORWARD, **config, shard=shard, axis=lnc)

    outs = ("out", *Options.of(config).stored)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split,),
        out_specs=tuple(lies(axes, role, lnc) for role in outs),
    )(laid(mesh, ops, split))


def _by_block(
    mesh: Mesh, lnc: str, ops: Operands, config: dict[str, Any]
) -> tuple[Array, ...]:
    """Each core has its part of the blocks."""
    opts, ops = Options.of(config), laid(mesh, ops, P())
    # What decides over all blocks (conditions, which slot of a token is the last) is
    # decided before they are dealt; a row that there is not marks an empty slot.
    token = slots_of(ops, opts, sum_dtype(ops)).token
    expert = ops.block_expert.reshape(-1)
    deal = _deal(mesh.shape[lnc], len(expert), config)
    rows, wide = ops.hidden.shape[0], accumulator(ops.hidden.dtype)
    given = ops._replace(
        token_id=_dealt(token, deal, rows),
        block_expert=_dealt(expert, deal, 0),
        conditions=None,
    )
    own = config | dict(accumulate=True, num_static=0)

    def local(ops: Operands) -> tuple[Array, ...]:
        token, expert = (x.reshape(-1) for x in (ops.token_id, ops.block_expert))
        ops = ops._replace(token_id=token, block_expert=expert)
        out, *stored = blockwise_mm(*ops, name=FORWARD, **own)
        out = lax.psum(out.astype(wide), lnc).astype(out.dtype)
        return out, *(x.reshape(deal[0], 1, deal[2], *x.shape[1:]) for x in stored)

    dealt = P(None, lnc)
    by_block = dict(token_id=dealt, block_expert=dealt)
    split = Operands._make(by_block.get(role, P()) for role in ops._fields)
    out, *stored = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split,),
        out_specs=(P(), *[dealt] * len(opts.stored)),
    )(laid(mesh, given, split))
    stored = laid(mesh, stored, P())
    return out, *(lax.collapse(x, 0, 3)[: len(expert)] for x in stored)


def _deal(cores: int, blocks: int, config: dict[str, Any]) -> tuple[int, int, int]:
    """`(rounds, cores, blocks of a core in a round)`."""
    share = -(-blocks // cores)
    if config.get("block_sharding_strategy") == "HI_LO":
        return 1, cores, share
    return share, cores, 1


def _dealt(x: Array, deal: tuple[int, int, int], empty: int) -> Array:
    """`x`, an entry for each block, by rounds and cores; the last are filled up."""
    spare = deal[0] * deal[1] * deal[2] - len(x)
    x = jnp.pad(x, [(0, spare), *[(0, 0)] * (x.ndim - 1)], constant_values=empty)
    return x.reshape(*deal, *x.shape[1:])


def _axes(
    function: str,
    mesh: Mesh,
    lnc: str,
    shard: str,
    ops: Operands,
    quantization: str,
) -> dict[str, int]:
    """Which axis of each operand is split; refuses what cannot be."""
    is_mx = quantization == "MX"
    if is_mx and shard not in BLOCK_SCALED:
        raise ValueError(
            f"{function}: block-scaled weights can be divided by block or along I; "
            "their columns of H are interleaved"
        )
    if shard == "intermediate":
        width = ops.gate_up_w.shape[-1]
        require_multiple(function, mesh, lnc, dict(I=(width, 512 if is_mx else 1)))
    else:
        require_multiple(function, mesh, lnc, dict(H=(ops.hidden.shape[1], 1)))
    return (BLOCK_SCALED if is_mx else DENSE)[shard]


def sharded_blockwise_mm_bwd(
    mesh: Mesh,
    hidden_states: Float[Array, "rows d_model"],
    expert_affinities_masked: Float[Array, "rows_experts 1"],
    gate_up_proj_weight: Float[Array, "num_experts d_model 2 d_ff"],
    down_proj_weight: Float[Array, "num_experts d_ff d_model"],
    gate_up_proj_act_checkpoint_T: Float[Array, "blocks 2 d_ff slots"],
    down_proj_act_checkpoint: Float[Array, "blocks slots d_model"] | None,
    token_position_to_id: Int[Array, " slots"],
    block_to_expert: Int[Array, "..."] | None,
    output_hidden_states_grad: Float[Array, "rows d_model"],
    block_size: int,
    *,
    lnc: str = "lnc",
    operands: str = "replicated",
    **options: Any,
) -> tuple[Array, ...]:
    r"""`blockwise_mm_bwd` divided over one axis of `mesh`.

    With its equations, for cores `c` that have a part `H_c` of the hidden axis:

    $$dM = \sum_c (a \, d\mathrm{out})_{H_c} W^{down\,T}_{H_c}, \qquad
      dx_{H_c} = dG \, W^{gate\,T}_{H_c} + dU \, W^{up\,T}_{H_c}, \qquad
      dW_{H_c} = x_{H_c}^T \, [dG, dU], \; M^T (a \, d\mathrm{out})_{H_c}$$

    Args:
        mesh: the devices.
        hidden_states: as in `blockwise_mm_bwd`; so are all others.
        expert_affinities_masked: `[rows * E, 1]`.
        gate_up_proj_weight: `[E, H, 2, I]`.
        down_proj_weight: `[E, I, H]`.
        gate_up_proj_act_checkpoint_T: `[N, 2, I, B]`.
        down_proj_act_checkpoint: `[N, B, H]`.
        token_position_to_id: `[N * B]`.
        block_to_expert: `[N]` or `[N, 1]`.
        output_hidden_states_grad: `[rows, H]`.
        block_size: `B`.
        lnc: the mesh axis of the cores.
        operands: how they lie on the cores. `"replicated"`: whole, as where cores share
            one memory; each computes the gradients of its columns of `H`, and nothing
            crosses the wire: dM, dG and dU, one of a block's four products, are
            computed whole on every core. `"hidden"`: split along `H`, with one
            all-reduce a block, of dM and the affinities' gradient. `"intermediate"`:
            split along `I`, with one all-reduce at the end, of the tokens' gradient.
        **options: further arguments of `blockwise_mm_bwd`, by name, but for
            `shard_option` and `axis`, which `operands` and `lnc` say.

    Returns:
        What `blockwise_mm_bwd` returns. Gradients are split as their operands are;
        from replicated ones, those of tokens and of both weights along `H`.

    Raises:
        ValueError: the mesh lacks the axis; its cores cannot share `I` or `H` evenly;
            or an argument breaks a rule of `blockwise_mm_bwd`.

    Source:
        aws-neuron/nki-library, `core/moe/blockwise_mm_bwd`, on two cores.

    Example:
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> h, affinity = jnp.ones((2, 4)), jnp.array([[1.0], [0.0]])
        >>> w, ids = (jnp.ones((1, 4, 2, 4)), jnp.ones((1, 4, 4))), jnp.array([0, 1])
        >>> stored = jnp.full((1, 2, 4, 2), 4.0), jnp.full((1, 2, 4), 62.8)
        >>> grads = sharded_blockwise_mm_bwd(
        ...     make_mesh(data=1), h, affinity, *w, *stored, ids, jnp.array([0]),
        ...     jnp.ones((2, 4)), 2, lnc="data",
        ... )
        >>> grads[1][:, 0].round(1)
        Array([251.2,   0. ], dtype=float32)
    """
    if operands not in _OPERANDS:
        words = ", ".join(_OPERANDS)
        raise ValueError(
            f"{_BACKWARD}: operands must be one of {words}, got {operands!r}"
        )
    if told := {"shard_option", "axis"} & options.keys():
        raise ValueError(
            f"{_BACKWARD}: operands and lnc say how cores share; "
            f"{' and '.join(sorted(told))} must not be given"
        )
    given = dict(
        hidden_states=hidden_states,
        expert_affinities_masked=expert_affinities_masked,
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        gate_up_proj_act_checkpoint_T=gate_up_proj_act_checkpoint_T,
        down_proj_act_checkpoint=down_proj_act_checkpoint,
        token_position_to_id=token_position_to_id,
        block_to_expert=block_to_expert,
        output_hidden_states_grad=output_hidden_states_grad,
        block_size=block_size,
        **options,
    )
    call = call_of(_BACKWARD, "blockwise_mm_bwd", mesh, lnc, given)
    return _backward(mesh, lnc, _OPERANDS[operands], call)


def _backward(
    mesh: Mesh, lnc: str, shard: str, call: SimpleNamespace
) -> tuple[Array, ...]:
    ops, given, config = backward_of(call)
    axes = _axes(_BACKWARD, mesh, lnc, shard, ops, "NONE")
    grads = axes | COLUMN_GRADS if shard == "columns" else axes

    def local(ops: Operands, given: tuple) -> tuple[Array, ...]:
        shared = config | dict(shard=shard, axis=lnc)
        grads = backward_macro(*ops, *given, name=BACKWARD, **shared)
        return in_given_dtypes(ops, grads, shared)

    roles = *_STORED, "d_out", "d_gate_up", "d_down"
    split = (
        Operands._make(lies(axes, role, lnc) for role in ops._fields),
        tuple(lies(axes, role, lnc) for role in roles),
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=split,
        out_specs=tuple(lies(grads, role, lnc) for role in config["grads"]),
    )(*laid(mesh, (ops, tuple(given)), split))
