"""A batch of nothing: who takes it, forwards and backwards, and who refuses it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.tools.verify.functions import FUNCTIONS

IDS = jnp.zeros((0, 3), jnp.int32)
EVERY = jnp.zeros((0, 2), jnp.int32)


def none(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def _moe_cte(x, affinities, gate_up, down):
    skip = dict(skip_token=True)
    ids, experts, _ = neuronjax.route_to_blocks(EVERY, 3, 4, num_blocks=2, **skip)
    arrays, spec = (x, affinities, gate_up, down, ids, experts, 4), "shard_on_block"
    return neuronjax.moe_cte(*arrays, spec, skip_dma=neuronjax.SkipMode(**skip))


# Of each function that takes an empty batch: a call of it, and its float operands.
TAKES = {
    "reduce": (lambda x: neuronjax.reduce(x, "norm", -1, norm="l2"), none(0, 3, 4)),
    "rms_norm": (neuronjax.rms_norm, none(0, 3, 4), jnp.ones(4)),
    "layer_norm": (neuronjax.layer_norm, none(0, 3, 4), jnp.ones(4), jnp.ones(4)),
    "fused_linear": (neuronjax.fused_linear, none(0, 3, 4), jnp.ones((4, 5))),
    "mlp": (
        lambda x, w, v: neuronjax.mlp(x, w, w, v)[0],
        none(0, 3, 4),
        jnp.ones((4, 5)),
        jnp.ones((5, 4)),
    ),
    "rmsnorm_quant": (
        lambda x, w: neuronjax.rmsnorm_quant(x, w),
        none(0, 3, 4),
        jnp.ones((1, 4)),
    ),
    "qkv": (neuronjax.qkv, none(0, 3, 4), jnp.ones((4, 6))),
    "qkv_cte": (neuronjax.qkv_cte, none(0, 3, 4), jnp.ones((4, 6))),
    "qkv_tkg": (
        lambda x, w: neuronjax.qkv_tkg(x, w, norm_type="NO_NORM"),
        none(0, 3, 4),
        jnp.ones((4, 6)),
    ),
    "output_projection_cte": (
        neuronjax.output_projection_cte,
        none(0, 2, 4, 3),
        jnp.ones((8, 6)),
    ),
    "output_projection_tkg": (
        neuronjax.output_projection_tkg,
        none(4, 0, 2, 3),
        jnp.ones((8, 6)),
    ),
    "RoPE": (neuronjax.RoPE, none(4, 0, 2, 8), none(2, 0, 8), none(2, 0, 8)),
    "rope_hf": (neuronjax.rope_hf, *[none(0, 2, 8, 4)] * 2, *[none(0, 8, 4)] * 2),
    "router_topk": (
        lambda x, w: neuronjax.router_topk(x, w, act_fn="SOFTMAX", k=2, x_hbm_layout=1),
        none(0, 4),
        jnp.ones((4, 6)),
    ),
    "moe_tkg": (
        lambda x, up, down, a: neuronjax.moe_tkg(x, up, down, a, EVERY, False),
        none(0, 4),
        jnp.ones((3, 4, 2, 5)),
        jnp.ones((3, 5, 4)),
        none(0, 3),
    ),
    "cross_entropy": (
        lambda x: neuronjax.cross_entropy(x, IDS, reduction="none"),
        none(0, 3, 5),
    ),
    "linear_cross_entropy": (
        lambda x, w: neuronjax.linear_cross_entropy(x, w, IDS, reduction="none"),
        none(0, 3, 4),
        jnp.ones((4, 5)),
    ),
    "conv1d": (neuronjax.conv1d, none(0, 3, 7), jnp.ones((3, 3, 4))),
    "depthwise_conv1d_implicit_gemm": (
        lambda x, w: neuronjax.depthwise_conv1d_implicit_gemm(
            x, w, feature_group_count=3
        ),
        none(0, 3, 1, 7),
        jnp.ones((3, 1, 1, 4)),
    ),
    "cumsum": (neuronjax.cumsum, none(0, 3, 4)),
    "transpose": (neuronjax.transpose, none(0, 3, 4)),
    "cross_entropy_forward": (
        lambda x: neuronjax.cross_entropy_forward(x, IDS[:, 0], dtype=jnp.float32),
        none(0, 5),
    ),
    "cross_entropy_backward": (
        lambda x, lse: neuronjax.cross_entropy_backward(
            x, IDS[:, 0], lse, dtype=jnp.float32
        ),
        none(0, 5),
        none(0),
    ),
    "moe_cte": (
        _moe_cte,
        none(0, 4),
        none(0, 1),
        jnp.ones((3, 4, 2, 5)),
        jnp.ones((3, 5, 4)),
    ),
}
# Of each function that refuses one: such a call, and the words.
REFUSES = {
    # The batch is folded into the heads, and no heads share no key head.
    "attention_cte": (
        lambda: neuronjax.attention_cte(none(0, 3, 4), none(0, 4, 3), none(0, 3, 4)),
        "no axis of q, k and v may be empty",
    ),
    "topk_reduce": (
        lambda: neuronjax.topk_reduce(none(0, 6, dtype="bfloat16"), 0, 2),
        "T and K must be integers from 1",
    ),
}
# A step of decode has a sequence, a backward its forward's operands, and the rows of a
# collective are those of all ranks (test_odd_and_empty_shapes of its own).
WITHOUT_BATCH = (
    "attention_bwd attention_tkg attention_block_tkg llama3_transformer "
    "blockwise_mm_bwd blockwise_mm_baseline_shard_hidden allgather_compute_matmul "
    "allgather_sb2sb allgather_sb2sb_tiled fine_grained_allgather "
    "fine_grained_reduce_scatter matmul_reduce_scatter"
).split()


def test_each_function_stands_in_one_table():
    assert sorted([*TAKES, *REFUSES, *WITHOUT_BATCH]) == sorted(FUNCTIONS)


@pytest.mark.parametrize("name", REFUSES)
def test_a_batch_of_nothing_is_refused_in_words(name):
    call, words = REFUSES[name]
    with pytest.raises(ValueError, match=f"^{name}: {words}"):
        call()


@pytest.mark.parametrize("name", TAKES)
def test_a_batch_of_nothing_gives_nothing_and_no_gradient(name):
    call, *operands = TAKES[name]

    def total(*operands):
        outs = jax.tree.leaves(call(*operands))
        floats = [x for x in outs if jnp.issubdtype(x.dtype, jnp.floating)]
        sums = [jnp.sum(x.astype(jnp.float32)) for x in floats]
        return sum(sums, jnp.float32(0)), outs

    each = tuple(range(len(operands)))
    run = jax.value_and_grad(total, each, has_aux=True)
    if name == "rmsnorm_quant":  # it has no derivative
        run = lambda *operands: (total(*operands), ())  # noqa: E731
    (value, outs), grads = jax.jit(run)(*operands)
    assert value == 0 and all(x.size == 0 for x in outs)
    for operand, gradient in zip(operands, grads, strict=False):
        assert gradient.shape == operand.shape
        np.testing.assert_array_equal(gradient, jnp.zeros_like(operand))
    if name == "moe_cte":  # its plain form gathers rows: there is none
        return
    with neuronjax.plain():
        plain = jax.tree.leaves(jax.eval_shape(call, *operands))
    assert [x.shape for x in plain] == [x.shape for x in outs]
