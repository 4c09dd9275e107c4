"""A small case of every layer of `neuronjax.nn`: inputs, and the call that it twins."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import neuronjax
from neuronjax import nn
from tests import nn_twins as twins
from tests.nn_twins import D_FF, HEAD_DIM, SEQ, WIDTH, draw


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer beside what it is the twin of.

    Attributes:
        make: the constructor: `make(**settings)` takes `dtype`, `param_dtype` and
            `rngs`, those that the layer has.
        inputs: what a call takes.
        twin: `twin(layer, *inputs)`: the functions themselves on its parameters.
        names: NAMEs that a call emits.
        call: `call(layer, *inputs)`.
        differentiable: its outputs have a derivative.
        typed: it takes `dtype`.
        has_parameters: it takes `rngs` and `param_dtype`.
        stackable: the first output is like the first input: layers can be scanned.
    """

    make: Callable[..., nnx.Module]
    inputs: tuple[Any, ...]
    twin: Callable[..., Any]
    names: tuple[str, ...]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)
    differentiable: bool = True
    typed: bool = True
    has_parameters: bool = True
    stackable: bool = False

    def make_new(self, **settings) -> nnx.Module:
        """A layer with its initial values."""
        if self.has_parameters:
            settings = dict(rngs=nnx.Rngs(0)) | settings
        return self.make(**settings)

    def layer(self, **settings) -> nnx.Module:
        """A layer whose parameters are neither one nor zero."""
        return stirred(self.make_new(**settings))


def stirred(layer):
    """The layer with parameters that are neither one nor zero."""
    state = nnx.state(layer, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    moved = [
        x + 0.1 * draw(*x.shape, seed=i, dtype=x.dtype) for i, x in enumerate(leaves)
    ]
    nnx.update(layer, jax.tree.unflatten(tree, moved))
    return layer


def _attention_of(**options):
    return lambda **kind: nn.Attention(WIDTH, 2, 1, HEAD_DIM, **options, **kind)


_X = draw(2, SEQ, WIDTH)
_TARGETS = jnp.array([[1, -1, 4], [0, 2, 3]], jnp.int32)
_LOSS = dict(ignore_index=-1, label_smoothing=0.1)
_WEIGHTS = jnp.abs(draw(2, SEQ, seed=3))
_NEW = (draw(2, 2, WIDTH), *twins.tables(seq=2), twins.cache(), twins.LENGTHS)
_STACK_NEW = (*_NEW[:3], twins.cache((2,), 2), twins.LENGTHS)
_SEGMENTS = jnp.array([[0, 0, 1], [4, 5, 5]], jnp.int32)
_CAUSAL = ("QKV", "CausalAttentionMMSoftmaxMMWithoutSwap", "OutputProjection")
_EXPERTS = ("NeuronReduceMacro", "RouterTopK", "BlockwiseMM")
_TKG = ("QKV", "AttentionTkgFwd", "OutputProjection")


CASES = {
    "RMSNorm": Case(
        lambda **kind: nn.RMSNorm(WIDTH, **kind),
        (_X,),
        lambda layer, x: neuronjax.rms_norm(x, layer.scale[...]),
        ("NeuronReduceMacro",),
        stackable=True,
    ),
    "LayerNorm": Case(
        lambda **kind: nn.LayerNorm(WIDTH, **kind),
        (_X,),
        lambda layer, x: neuronjax.layer_norm(x, layer.scale[...], layer.bias[...]),
        ("NeuronReduceMacro",),
        stackable=True,
    ),
    "RMSNormQuant": Case(
        lambda **kind: nn.RMSNormQuant(WIDTH, **kind),
        (_X,),
        lambda layer, x: neuronjax.rmsnorm_quant(x, layer.scale[...]),
        ("RMSNormQuant",),
        differentiable=False,
    ),
    "RotaryEmbedding": Case(
        lambda **kind: nn.RotaryEmbedding(
            HEAD_DIM, theta=500.0, interleaved=True, **kind
        ),
        (draw(2, 2, SEQ, HEAD_DIM), jnp.array([[0, 1, 2], [3, 4, 9]], jnp.int32)),
        twins.rotated,
        ("RoPE",),
        has_parameters=False,
        stackable=True,
    ),
    "QKV": Case(
        lambda **kind: nn.QKV(
            *(WIDTH, 2, 1, HEAD_DIM),
            bias=True,
            norm_type="LAYER_NORM",
            output_layout="NBSd",
            **kind,
        ),
        (_X, *twins.tables(), draw(2, SEQ, WIDTH, seed=1), draw(2, SEQ, WIDTH, seed=2)),
        twins.qkv,
        ("QKV",),
    ),
    "OutputProjection": Case(
        lambda **kind: nn.OutputProjection(2, HEAD_DIM, WIDTH, bias=True, **kind),
        (draw(2, 2, HEAD_DIM, SEQ),),
        lambda layer, x: neuronjax.output_projection_cte(
            x, layer.kernel[...], twins.row(layer.bias)
        ),
        ("OutputProjection",),
    ),
    "OutputProjection, decode": Case(
        lambda **kind: nn.OutputProjection(2, HEAD_DIM, WIDTH, bias=True, **kind),
        (draw(HEAD_DIM, 2, 2, 1),),
        lambda layer, x: neuronjax.output_projection_tkg(
            x, layer.kernel[...], twins.row(layer.bias)
        ),
        ("OutputProjection",),
        call=twins.decode,
    ),
    "Attention": Case(
        _attention_of(), (_X, *twins.tables()), twins.attention, _CAUSAL, stackable=True
    ),
    "Attention, not causal, not rotated": Case(
        _attention_of(causal=False),
        (_X,),
        lambda layer, x: twins.attended(
            layer, twins.heads(layer, x, None, None), causal_mask=False
        ),
        ("QKV", "AttentionMMSoftmaxMM", "OutputProjection"),
        call=lambda layer, x: layer(x, None, None),
        stackable=True,
    ),
    "Attention, window, sink and cap": Case(
        _attention_of(sliding_window=2, sink=True, logits_soft_cap=1.5),
        (_X, *twins.tables()),
        twins.options,
        _CAUSAL,
        stackable=True,
    ),
    "Attention, decode": Case(
        _attention_of(sliding_window=3, sink=True),
        _NEW,
        twins.attention_decode,
        _TKG,
        call=twins.decode,
    ),
    "Attention, packed": Case(
        _attention_of(), (_X, *twins.tables(), _SEGMENTS), twins.packed, _CAUSAL
    ),
    "AttentionBlock": Case(
        lambda **kind: nn.AttentionBlock(
            *(WIDTH, 2, HEAD_DIM), qk_norm="post_rope", bias=True, sink=True, **kind
        ),
        _NEW,
        twins.block,
        ("AttentionBlockTkg",),
    ),
    "MLP": Case(
        lambda **kind: nn.MLP(WIDTH, D_FF, **kind),
        (_X,),
        twins.mlp,
        ("MLP",),
        stackable=True,
    ),
    "DecoderLayer": Case(
        lambda **kind: nn.DecoderLayer(WIDTH, D_FF, 2, 1, HEAD_DIM, **kind),
        (_X, *twins.tables()),
        twins.decoder_layer,
        (*_CAUSAL, "MLP"),
        stackable=True,
    ),
    "MoEDecoderLayer": Case(
        lambda **kind: nn.MoEDecoderLayer(WIDTH, D_FF, 2, 1, HEAD_DIM, 4, 2, **kind),
        (_X, *twins.tables()),
        twins.decoder_layer,
        (*_CAUSAL, *_EXPERTS),
        stackable=True,
    ),
    "FusedLinear": Case(
        lambda **kind: nn.FusedLinear(WIDTH, D_FF, norm_type="RMS_NORM", **kind),
        (_X,),
        lambda layer, x: neuronjax.fused_linear(
            x,
            layer.kernel[...],
            layer.bias[...],
            norm_type="RMS_NORM",
            gamma=layer.gamma[...],
        ),
        ("FusedLinear",),
    ),
    "Router": Case(
        lambda **kind: nn.Router(
            *(WIDTH, 4, 2), act_fn="SIGMOID", bias=True, selection_bias=True, **kind
        ),
        (draw(5, WIDTH),),
        twins.routed,
        ("RouterTopK",),
    ),
    "MoE": Case(
        lambda **kind: nn.MoE(WIDTH, D_FF, 4, 2, block_size=2, **kind),
        (_X,),
        twins.moe,
        _EXPERTS,
        stackable=True,
    ),
    "MoE, decode block": Case(
        lambda **kind: nn.MoE(WIDTH, D_FF, 4, 2, shared_d_ff=2, **kind),
        (draw(2, 1, WIDTH), draw(2, 1, WIDTH, seed=1)),
        twins.moe_block,
        ("NeuronReduceMacro", "RouterTopK", "ExpertMLPs", "MLP"),
        call=lambda layer, *inputs: layer.decode_block(*inputs),
    ),
    "Conv1D": Case(
        lambda **kind: nn.Conv1D(WIDTH, 4, 2, padding=(1, 0), **kind),
        (draw(2, WIDTH, 5),),
        lambda layer, x: neuronjax.conv1d(
            x, layer.filters[...], layer.bias[...], 1, (1, 0)
        ),
        ("Conv1D",),
    ),
    "DepthwiseConv1D": Case(
        lambda **kind: nn.DepthwiseConv1D(WIDTH, 2, padding=(1, 0), **kind),
        (draw(2, WIDTH, 1, 5),),
        lambda layer, x: neuronjax.depthwise_conv1d_implicit_gemm(
            x, layer.filters[...], ((0, 0), (1, 0)), feature_group_count=WIDTH
        ),
        ("DepthwiseConv1D",),
        stackable=True,
    ),
    "CrossEntropy": Case(
        lambda **_: nn.CrossEntropy(**_LOSS),
        (draw(2, SEQ, 5), _TARGETS, _WEIGHTS),
        twins.loss,
        ("CrossEntropyFwd",),
        typed=False,
        has_parameters=False,
    ),
    "LinearCrossEntropy": Case(
        lambda **kind: nn.LinearCrossEntropy(WIDTH, 5, **_LOSS, **kind),
        (_X, _TARGETS, _WEIGHTS),
        twins.loss,
        ("LinearCrossEntropy",),
    ),
    "ColumnParallel": Case(
        lambda **kind: nn.ColumnParallel(WIDTH, D_FF, **kind),
        (draw(SEQ, WIDTH),),
        lambda layer, x: neuronjax.allgather_compute_matmul(x, layer.kernel[...], 1, 1),
        ("CollectiveMatmul",),
    ),
    "RowParallel": Case(
        lambda **kind: nn.RowParallel(WIDTH, D_FF, **kind),
        (draw(SEQ, WIDTH),),
        lambda layer, x: neuronjax.matmul_reduce_scatter(x, layer.kernel[...], 1, 1),
        ("MatmulReduceScatter",),
    ),
    "DecoderStack": Case(
        lambda **kind: nn.DecoderStack(WIDTH, D_FF, 2, 4, 2, HEAD_DIM, **kind),
        (_X, *twins.tables()),
        twins.stack,
        ("Llama3Transformer",),
        stackable=True,
    ),
    "DecoderStack, decode": Case(
        lambda **kind: nn.DecoderStack(WIDTH, D_FF, 2, 4, 2, HEAD_DIM, **kind),
        _STACK_NEW,
        twins.stack_decode,
        ("AttentionBlockTkg", "MLP"),
        call=twins.decode,
    ),
}
