"""What `transformer_tkg` refuses beside the examples of its rules."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.primitives.transformer_tkg import parts
from tests import transformer_case as case
from tests.transformer_case import operands, sizes


def _with(name, i, x):
    """The call with another entry of a list."""

    def change(call):
        return call | {name: [*call[name][:i], x, *call[name][i + 1 :]]}

    return change


def _set(**changes):
    return lambda call: call | changes


def _stack(**changes):
    return lambda call: case.stacked(call) | changes


def _swapped(name):
    return lambda call: call | {name: [x.swapaxes(2, 3) for x in call[name]]}


WRONG = [
    (_set(num_layers=3), "W_qkvs must be a list of at least num_layers = 3, got 2"),
    (_set(num_layers=True), "num_layers must be a positive integer"),
    (_set(num_layers=1.0), "num_layers must be a positive integer"),
    (_set(X=None), "X must be an array of 3 axes, got NoneType"),
    (_set(RoPE_sin=None), "RoPE_sin must be an array of 3 axes"),
    (_set(mask_cache=None), "mask_cache must be an array of 4 axes"),
    (_with("W_ups", 1, None), "W_ups[1] must be an array of 2 axes, got NoneType"),
    (_with("W_ups", 1, np.zeros((8, 9))), "W_gates[1] must have shape [H, I] = (8, 9)"),
    (_with("K_caches", 0, np.zeros((2, 8))), "K_caches[0] must be an array of 4 axes"),
    (
        _swapped("K_caches"),
        "K_caches[0] must have shape [B, G, D, S_max] = (2, 2, 4, 9)",
    ),
    (_with("W_gamma_mlps", 1, np.zeros((1, 9))), "W_gamma_mlps[1] must have shape"),
    (
        _with("W_outs", 1, np.zeros((8, 8))),
        "W_outs[1] must have shape [G*n*D, H/cores]",
    ),
    (_with("W_outs", 0, np.zeros((16, 8), int)), "got W_outs[0] of dtype int"),
    (_stack(num_layers=1), "first of 3 axes is num_layers = 1"),
    (_stack(num_layers=3), "first of 3 axes is num_layers = 3"),
    (_stack(W_ups=[np.zeros((8, 8))] * 2), "W_ups must be an array whose first of 3"),
    (_set(W_ups=np.zeros((2, 8, 8))), "W_ups must be a list of at least num_layers"),
    (_set(mask_cache=np.ones((7, 2, 3, 2), int)), "mask_cache must have shape"),
    (_set(mask_cache=np.ones((1, 2, 1, 2), int)), "S_ctx from S to S_max = 9"),
    (_set(mask_cache=np.ones((7, 2, 4, 2))), "got mask_cache of dtype float64"),
    (_set(mask_active=np.ones((2, 2, 3, 2), int)), "mask_active must have shape"),
    (_set(position_ids=np.ones((2, 2))), "got position_ids of dtype float64"),
    (_set(position_ids=np.array([[1, 2], [3, 5]])), "one after another, got [3, 5]"),
    (_set(position_ids=np.array([[1], [8]])), "leave room for S = 2 tokens in 9 slots"),
    (_set(position_ids=np.array([[1], [-2]])), "leave room for S = 2 tokens"),
    (_set(eps=-1.0), "eps and clamp_bound must be finite"),
    (_set(eps=float("nan")), "eps and clamp_bound must be finite"),
    (_set(clamp_bound=float("inf")), "eps and clamp_bound must be finite"),
    (_set(sbuf_residual_and_cc="yes"), "sbuf_residual_and_cc True or False"),
    (_set(axis="tensor"), "replica_groups needs replica_groups for axis 'tensor'"),
    (_set(replica_groups=[[0, 1]]), "needs the name of their mesh axis as axis"),
    (_set(replica_groups=[]), "lists of integers, of one length"),
    (_set(replica_groups=[[0.7]]), "lists of integers"),
    (
        _set(W_qkvs=None),
        "W_qkvs must be a list of layers or one array of 3 axes, got N",
    ),
    (_set(W_qkvs=iter(())), "W_qkvs must be a list of layers or one array of 3 axes"),
    (_set(replica_groups=3), "lists of integers"),
    (_set(lnc_axis="lnc"), "lnc_axis must name a mesh axis of the 2 cores"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[m for _, m in WRONG])
def test_a_wrong_call_is_refused_in_words(change, message):
    call = change(operands(sizes()))
    report = neuronjax.can("transformer_tkg", **call)
    assert not report and message in str(report)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        neuronjax.transformer_tkg(**call)
    lines = str(refusal.value).splitlines()
    assert all(line.startswith("transformer_tkg: ") for line in lines)


QUANTIZED_WRONG = [
    (_with("W_gate_scales", 1, None), "some for layer 1"),
    (_with("W_down_scales", 1, None), "some for layer 1"),
    (_with("W_up_scales", 1, jnp.ones((8, 8))), "float32 of shape [1 or 128, I]"),
    (_with("W_up_scales", 1, jnp.ones((1, 7))), "float32 of shape [1 or 128, I]"),
    (
        _with("W_up_scales", 1, jnp.ones((1, 8), jnp.bfloat16)),
        "got bfloat16 of shape (1, 8)",
    ),
    (_with("W_ups", 1, jnp.ones((8, 8))), "layer 1: ROW takes weights of float8_e4m3"),
]


@pytest.mark.parametrize(
    ("change", "message"), QUANTIZED_WRONG, ids=[m for _, m in QUANTIZED_WRONG]
)
def test_a_wrong_quantized_layer_is_refused_in_words(change, message):
    call = change(operands(sizes(quantized=(1,))))
    with pytest.raises(ValueError, match=re.escape(message)):
        neuronjax.transformer_tkg(**call)


def test_fp8_weights_without_scales_are_refused():
    call = operands(sizes())
    call["W_ups"] = [x.astype(jnp.float8_e4m3) for x in call["W_ups"]]
    with pytest.raises(ValueError, match=r"got W_ups\[0\] of dtype float8_e4m3"):
        neuronjax.transformer_tkg(**call)


def test_an_odd_head_cannot_be_rotated():
    call = operands(sizes(D=3, n=1))
    with pytest.raises(ValueError, match="RoPE_cos and RoPE_sin must have shape"):
        neuronjax.transformer_tkg(**call)


def test_layers_of_the_same_shapes_are_judged_once(monkeypatch):
    seen = []

    def spied(function, *args, **kwargs):
        seen.append(function)
        return neuronjax.can(function, *args, **kwargs)

    monkeypatch.setattr(parts, "can", spied)
    call = operands(sizes(L=5, quantized=(3,)))
    neuronjax.transformer_tkg(**call)
    block = "attention_block_tkg_kernel"
    assert seen == [block, "mlp_kernel", block, "quant_mlp_kernel"]
    assert neuronjax.can("transformer_tkg", **call)


def test_every_broken_rule_is_listed():
    call = operands(sizes()) | dict(eps=-1.0, replica_groups=[[0, 1]])
    with pytest.raises(ValueError) as refusal:
        neuronjax.transformer_tkg(**call)
    assert len(str(refusal.value).splitlines()) == 2


def test_the_chips_limits_are_reported_and_not_refused():
    call = operands(sizes())
    report = neuronjax.can("transformer_tkg", **call)
    assert report and not report.on_chip
    assert "one key/value head a rank" in str(report)
    assert "takes H in multiples of 128" in str(report)
    shapes = dict(G=1, n=2, H=128, I=128, D=16)
    assert neuronjax.can("transformer_tkg", **operands(sizes(**shapes))).on_chip


def test_abstract_operands_are_judged_by_shape():
    arrays, rest = case.split(operands(sizes()))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    assert neuronjax.can("transformer_tkg", **shapes, **rest)
