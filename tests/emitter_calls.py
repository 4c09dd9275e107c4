"""One small call of each emitter for each NAME that it emits, as data."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.expert_mlps.operands import TILE_AXES
from tests.arrays import array
from tests.attention_block_case import operands, sizes


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one emitter.

    Attributes:
        emitter: a name of `neuronjax.emit`.
        operands: arrays and tiles, by the emitter's argument.
        config: its other arguments.
        target: the chip generation.
        over: operands that the ranks of a mesh axis hold in parts; with it the call
            runs under `shard_map` over two devices.
        leading: positional arguments in front of the operands.
    """

    emitter: str
    operands: Mapping[str, Any]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: str = "gen3"
    over: tuple[str, ...] = ()
    leading: tuple[Any, ...] = ()

    @property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(dict(self.operands))

    def fun(self, *arrays: jax.Array) -> Any:
        """The call as a function of flat arrays."""
        if self.over:
            return _on_ranks(self._emit, self.operands, self.over)(*arrays)
        return self._emit(*arrays)

    def _emit(self, *arrays: jax.Array) -> Any:
        operands = jax.tree.unflatten(jax.tree.structure(dict(self.operands)), arrays)
        emitter = getattr(emit, self.emitter)
        with neuronjax.target(self.target):
            if self.leading:  # an emitter of operands without names
                return emitter(*self.leading, *operands.values(), **self.config)
            return emitter(**operands, **self.config)

    def gradient(self, *arrays: jax.Array) -> tuple:
        """The gradient of the outputs' squares for every float array."""
        where = [i for i, x in enumerate(arrays) if is_differentiable(x.dtype)]

        def loss(*live):
            operands = list(arrays)
            for i, x in zip(where, live, strict=True):
                operands[i] = x
            outs = jax.tree.leaves(self.fun(*operands))
            floats = [x for x in outs if is_differentiable(x.dtype)]
            return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in floats)

        return jax.grad(loss, tuple(range(len(where))))(*[arrays[i] for i in where])


def _on_ranks(fun: Callable, operands: Mapping[str, Any], over: tuple) -> Callable:
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tensor",), kinds, devices=jax.devices()[:2])
    specs = [P("tensor") if key in over else P() for key in sorted(operands)]
    return jax.shard_map(fun, mesh=mesh, in_specs=tuple(specs), out_specs=P("tensor"))


def normal(*shape: int, dtype: Any = "float32") -> jax.Array:
    """Numbers that depend on the shape alone."""
    return array(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def tile(axis: int, *shape: int) -> MemrefTile:
    """A tile of such numbers, `axis` on the partitions."""
    return MemrefTile.from_tensor(normal(*shape), axis)


def _integers(*values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


_QKV = dict(q=normal(2, 4, 3), k=normal(2, 4, 5), v=normal(2, 5, 4))
_HIDDEN = dict(hidden=normal(2, 3, 4))
_MLP = dict(gate_w=normal(4, 6), up_w=normal(4, 6), down_w=normal(6, 4))
_EXPERTS = dict(
    hidden=normal(4, 8),
    affinity=normal(8, 1),
    gate_up_w=normal(2, 8, 2, 6),
    down_w=normal(2, 6, 8),
    token_id=_integers(0, 2, 1, 3, 3, 3),
    block_expert=_integers(0, 1, 1),
)
_LLAMA = dict(
    X=normal(1, 2, 4),
    W_qkvs=normal(2, 4, 8),
    W_outs=normal(2, 4, 4),
    W_gates=normal(2, 4, 3),
    W_ups=normal(2, 4, 3),
    W_downs=normal(2, 3, 4),
    W_gamma_qkvs=normal(2, 1, 4),
    W_gamma_mlps=normal(2, 1, 4),
    RoPE_cos=normal(1, 1, 2),
    RoPE_sin=normal(1, 1, 2),
)
_TOKENS = dict(logits=normal(3, 5), targets=_integers(0, 4, 2))
_PRODUCT = dict(lhs=normal(4, 3), rhs=normal(3, 2))

attention = functools.partial(Call, "attention_kernel")

CALLS: dict[str, Call] = {
    "AttentionMMSoftmaxMM": attention(
        dict(q=normal(2, 4, 3), k=normal(2, 5, 4), v=normal(2, 5, 4)), dict(tp_k=True)
    ),
    "AttentionMMSoftmaxMMWithoutSwap": attention(_QKV),
    "CausalAttentionMMSoftmaxMMWithoutSwap": attention(_QKV, dict(is_causal=True)),
    "V2AttentionMMSoftmaxMMWithoutSwap": attention(_QKV, target="gen2"),
    "V2CausalAttentionMMSoftmaxMMWithoutSwap": attention(
        _QKV, dict(is_causal=True), target="gen2"
    ),
    "TiledNativeKernelAttention": attention(
        dict(q=tile(1, 2, 4, 3), k=tile(1, 2, 4, 5), v=tile(1, 2, 5, 4))
    ),
    "BackwardsAttention": Call(
        "backwards_attention_kernel",
        _QKV
        | dict(out=normal(2, 3, 4), d_out=normal(2, 3, 4))
        | dict(neg_max=normal(2, 3, 1), recip=normal(2, 3, 1)),
    ),
    "MLP": Call("mlp_kernel", _HIDDEN | _MLP),
    "TiledNativeKernelMLP": Call(
        "mlp_kernel",
        dict(
            hidden=tile(2, 2, 3, 128),
            gate_w=tile(0, 128, 128),
            up_w=tile(0, 128, 128),
            down_w=tile(0, 128, 128),
        ),
    ),
    "QKV": Call("qkv_kernel", _HIDDEN | dict(qkv_w=normal(4, 8), norm_w=normal(1, 4))),
    "TiledNativeKernelQKV": Call(
        "qkv_kernel",
        dict(hidden=tile(2, 2, 3, 128), qkv_w=tile(0, 128, 128)),
        dict(norm_type="NO_NORM"),
    ),
    "RMSNormQuant": Call(
        "rmsnorm_quant_kernel", dict(hidden_in=normal(2, 3, 4), weight=normal(4))
    ),
    "TiledNativeKernelRMSNormQuant": Call(
        "rmsnorm_quant_kernel", dict(hidden_in=tile(2, 2, 3, 4), weight=tile(0, 4))
    ),
    "RouterTopK": Call(
        "router_topk_kernel", dict(x=normal(3, 4), w=normal(4, 5)), dict(k=2)
    ),
    "ExpertMLPs": Call(
        "expert_mlps_kernel",
        dict(
            hidden=normal(2, 4),
            gate_up_w=normal(2, 4, 2, 3),
            down_w=normal(2, 3, 4),
            affinities=normal(2, 2),
            index=_integers([0], [1]),
        ),
        dict(scaling="POST_SCALE"),
    ),
    "RowTiledMM": Call(
        "row_tiled_mm_kernel", dict(stationary=normal(2, 4, 3), moving=normal(2, 4, 5))
    ),
    "ColumnTiledMM": Call(
        "column_tiled_mm_kernel",
        dict(stationary=normal(2, 4, 3), moving=normal(2, 4, 5)),
    ),
    "CaymanPackedPETranspose": Call(
        "packed_cayman_pe_tp_kernel",
        dict(stationary=normal(4, 2, 3), moving=normal(4, 2, 5)),
    ),
    "NeuronReduceMacro": Call(
        "neuron_reduce_macro_kernel",
        dict(x=normal(2, 4), scale=normal(4)),
        dict(norm="rms"),
    ),
    "BIRKernel": Call("bir_kernel", dict(x=normal(2, 4)), leading=("CumSum",)),
    "BlockwiseMM": Call("blockwise_mm_kernel", _EXPERTS, dict(block_size=2)),
    "BlockwiseMMBwd": Call(
        "blockwise_mm_bwd_kernel",
        _EXPERTS
        | dict(gate_up=normal(3, 2, 6, 2), down=normal(3, 2, 8), d_out=normal(4, 8)),
        dict(block_size=2),
    ),
    "CollectiveMatmul": Call(
        "collective_matmul_kernel", _PRODUCT, dict(axis="tensor"), over=("lhs",)
    ),
    "MatmulReduceScatter": Call(
        "matmul_reduce_scatter_kernel",
        dict(lhs=normal(8, 3), rhs=normal(3, 2)),
        dict(axis="tensor"),
        over=("lhs",),
    ),
    "FineGrainedAllGather": Call(
        "fine_grained_all_gather_kernel",
        dict(lhs=normal(4, 3)),
        dict(axis="tensor"),
        over=("lhs",),
    ),
    "FineGrainedReduceScatter": Call(
        "fine_grained_reduce_scatter_kernel",
        dict(lhs=normal(8, 3)),
        dict(axis="tensor"),
        over=("lhs",),
    ),
    "SB2SBAllGather": Call(
        "sb2sb_all_gather_kernel",
        dict(inp=normal(4, 3)),
        dict(axis="tensor"),
        over=("inp",),
    ),
    "TopKReduce": Call(
        "top_k_reduce_kernel",
        dict(rows=normal(4, 3), index=_integers(0, 1, -1, 1)),
        dict(T=2, K=2),
    ),
    "Conv1D": Call(
        "conv1d_kernel", dict(x_in=normal(2, 3, 7), filters=normal(2, 3, 4))
    ),
    "DepthwiseConv1D": Call(
        "depthwise_conv1d_kernel",
        dict(img_ref=normal(2, 3, 1, 7), filter_ref=normal(3, 1, 1, 2)),
    ),
    "CrossEntropyFwd": Call("cross_entropy_fwd_kernel", _TOKENS),
    "CrossEntropyBwd": Call("cross_entropy_bwd_kernel", _TOKENS | dict(lse=normal(3))),
    "LinearCrossEntropy": Call(
        "linear_cross_entropy_kernel",
        dict(x=normal(3, 4), w=normal(4, 5), targets=_integers(0, 4, 2)),
    ),
    "CumSum": Call("cum_sum_kernel", dict(x=normal(2, 4))),
    "RoPE": Call(
        "rope_kernel",
        dict(x=normal(4, 2, 1, 3), cos=normal(2, 2, 3), sin=normal(2, 2, 3)),
    ),
    "OutputProjection": Call(
        "output_projection_kernel",
        dict(attention=normal(1, 2, 4, 3), weight=normal(8, 6)),
    ),
    "Transpose": Call("transpose_kernel", dict(x=normal(2, 3, 4))),
    "FusedLinear": Call("fused_linear_kernel", dict(x=normal(2, 4), w=normal(4, 3))),
    "Llama3Transformer": Call("llama3_transformer_kernel", _LLAMA),
}

# The decode families, whose operands are many.
CALLS["AttentionTkgFwd"] = Call(
    "attention_tkg_fwd_kernel",
    dict(
        q=normal(1, 2, 1, 4),
        k_active=normal(1, 1, 1, 4),
        v_active=normal(1, 1, 1, 4),
        k_prior=normal(1, 1, 4, 6),
        v_prior=normal(1, 1, 6, 4),
        lengths=_integers(3),
    ),
)
CALLS["AttentionBlockTkg"] = Call(
    "attention_block_tkg_kernel",
    operands(sizes(batch=1, seq=1, slots=4, visible=3), {}),
)

# The NAMEs that take tiles as well as tensors.
TILED: dict[str, Call] = {
    "AttentionTkgFwd": Call(
        "attention_tkg_fwd_kernel",
        dict(
            q=tile(3, 1, 2, 1, 4),
            k_active=tile(3, 1, 1, 1, 4),
            v_active=tile(2, 1, 1, 1, 4),
            k_prior=tile(2, 1, 1, 4, 6),
            v_prior=tile(2, 1, 1, 6, 4),
            lengths=MemrefTile.from_tensor(_integers(3)),
        ),
    ),
    "RouterTopK": Call(
        "router_topk_kernel", dict(x=tile(1, 3, 128), w=tile(0, 128, 5)), dict(k=2)
    ),
    "ExpertMLPs": Call(
        "expert_mlps_kernel",
        {
            key: MemrefTile.from_tensor(x, TILE_AXES[key])
            for key, x in CALLS["ExpertMLPs"].operands.items()
        },
        dict(scaling="POST_SCALE"),
    ),
    "RowTiledMM": Call(
        "row_tiled_mm_kernel", dict(stationary=tile(0, 4, 3), moving=tile(0, 4, 5))
    ),
    "ColumnTiledMM": Call(
        "column_tiled_mm_kernel", dict(stationary=tile(0, 4, 3), moving=tile(0, 4, 5))
    ),
    "CaymanPackedPETranspose": Call(
        "packed_cayman_pe_tp_kernel",
        dict(stationary=tile(0, 4, 2, 3), moving=tile(0, 4, 2, 5)),
    ),
    "OutputProjection": Call(
        "output_projection_kernel",
        dict(attention=tile(2, 1, 2, 4, 3), weight=tile(1, 2, 4, 6)),
    ),
    "Transpose": Call("transpose_kernel", dict(x=tile(0, 3, 4))),
}

_FP8 = {key: x.astype(jnp.float8_e4m3) for key, x in _MLP.items()}
_SCALES = dict(gate_up_w_scale=jnp.ones((2, 6)), down_w_scale=jnp.ones((1, 4)))
_SUM = dict(mlp_out=normal(2, 3, 4), attn_out=normal(2, 3, 4))

# Emitters beside those of the table: (NAME that they emit, call).
OTHERS: dict[str, tuple[str, Call]] = {
    call.emitter: (name, call)
    for name, call in [
        ("MLP", Call("mlp_fused_add_kernel", _HIDDEN | _MLP | _SUM)),
        ("MLP", Call("quant_mlp_kernel", _HIDDEN | _FP8 | _SCALES)),
        ("MLP", Call("quant_mlp_fused_add_kernel", _HIDDEN | _FP8 | _SCALES | _SUM)),
        (
            "QKV",
            Call(
                "qkv_fused_add_kernel",
                CALLS["QKV"].operands | _SUM,
                CALLS["QKV"].config,
            ),
        ),
        (
            "CausalAttentionMMSoftmaxMMWithoutSwap",
            Call(
                "attention_prefix_caching_fwd_kernel",
                _QKV | dict(k_prior=normal(2, 4, 6), v_prior=normal(2, 6, 4)),
                dict(kernel_name="CausalAttentionMMSoftmaxMMWithoutSwap"),
            ),
        ),
    ]
}

# The NAMEs that differentiation emits, and the NAMEs whose gradient they are.
BACKWARDS = {
    "AttentionTkgFwdBwd": "AttentionTkgFwd",
    "AttentionBlockTkgBwd": "AttentionBlockTkg",
    "BackwardsAttention": "CausalAttentionMMSoftmaxMMWithoutSwap",
    "BlockwiseMMBwd": "BlockwiseMM",
    "CrossEntropyBwd": "CrossEntropyFwd",
} | {
    f"{name}Bwd": name
    for name in (
        "CollectiveMatmul",
        "SB2SBAllGather",
        "MLP",
        "QKV",
        "OutputProjection",
        "RoPE",
        "NeuronReduceMacro",
        "FusedLinear",
        "RouterTopK",
        "TopKReduce",
        "CumSum",
        "Conv1D",
        "DepthwiseConv1D",
        "LinearCrossEntropy",
        "Llama3Transformer",
    )
}
