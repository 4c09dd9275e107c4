"""Weight packers and their inverses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.models import packing

RNG = np.random.default_rng(0)


def normal(*shape, kind=np):
    return kind.asarray(RNG.standard_normal(shape), "float32")


@pytest.mark.parametrize("kind", [np, jnp])
def test_query_key_and_value_columns_stand_in_that_order(kind):
    q, k, v = (normal(5, width, kind=kind) for width in (12, 4, 4))
    fused = packing.pack_qkv(q, k, v)
    assert isinstance(fused, type(q)) and fused.shape == (5, 20)
    np.testing.assert_array_equal(fused[:, 12:16], k)
    for part, wanted in zip(packing.unpack_qkv(fused, 6, 2), (q, k, v), strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_a_fused_projection_equals_three():
    q, k, v = (normal(6, width) for width in (8, 4, 4))
    x = jnp.asarray(normal(2, 3, 6))
    out = neuronjax.qkv(x, jnp.asarray(packing.pack_qkv(q, k, v)))
    wanted = np.concatenate([x @ w for w in (q, k, v)], -1)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [np, jnp])
def test_gate_stands_before_up(kind):
    gate, up = normal(5, 7, kind=kind), normal(5, 7, kind=kind)
    packed = packing.pack_gate_up(gate, up)
    assert isinstance(packed, type(gate)) and packed.shape == (5, 2, 7)
    np.testing.assert_array_equal(packed[:, 0], gate)
    for part, wanted in zip(packing.unpack_gate_up(packed), (gate, up), strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_biases_pack_like_weights():
    q, k, v = normal(8), normal(2), normal(2)
    assert packing.pack_qkv(q, k, v).shape == (12,)
    assert packing.pack_gate_up(k, v).shape == (2, 2)


def test_channel_order_of_the_pairings():
    """R-18: a head of four channels is reordered [0, 2, 1, 3]."""
    channels = np.arange(8)
    half_split = packing.to_half_split(channels, num_heads=2)
    assert half_split.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    six = packing.to_half_split(np.arange(6), num_heads=1)
    assert six.tolist() == [0, 2, 4, 1, 3, 5]
    assert packing.to_interleaved(six, num_heads=1).tolist() == list(range(6))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_pairings_are_inverses_on_any_axis(axis):
    weight = normal(12, 12)
    there = packing.to_half_split(weight, 2, axis)
    np.testing.assert_array_equal(packing.to_interleaved(there, 2, axis), weight)
    assert not np.array_equal(there, weight)


def _scores(x, w_q, w_k, heads, cos, sin, contiguous):
    """Scores of two query heads with one key head, rotated in one of the pairings."""

    def rotated(w, n):
        y = (x @ w).reshape(x.shape[0], n, -1)
        y = jnp.transpose(y, (2, 1, 0))[:, None]
        return neuronjax.RoPE(y, cos, sin, contiguous_layout=contiguous)[:, 0]

    q, k = rotated(w_q, heads), rotated(w_k, 1)
    return jnp.einsum("dns,dmt->nst", q, k)


def test_both_pairings_give_equal_scores_after_conversion():
    """R-18."""
    x = jnp.asarray(normal(5, 16))
    w_q, w_k = normal(16, 2 * 8), normal(16, 8)
    angles = jnp.outer(10.0 ** -jnp.arange(4.0), jnp.arange(5.0))[:, None]
    tables = jnp.cos(angles), jnp.sin(angles)
    wanted = _scores(x, w_q, w_k, 2, *tables, contiguous=False)
    converted = packing.to_half_split(w_q, 2), packing.to_half_split(w_k, 1)
    got = _scores(x, *converted, 2, *tables, contiguous=True)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
    wrong = _scores(x, w_q, w_k, 2, *tables, contiguous=True)
    assert np.abs(wrong - wanted).max() > 0.1


def _checkpoint(num_layers=2, own_head=True):
    tensors = {"embed_tokens": (11, 8), "norm": (8,)}
    for i in range(num_layers):
        shapes = {
            "input_layernorm": (8,),
            "self_attn.q_proj": (12, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 12),
            "post_attention_layernorm": (8,),
            "mlp.gate_proj": (10, 8),
            "mlp.up_proj": (10, 8),
            "mlp.down_proj": (8, 10),
        }
        tensors |= {f"layers.{i}.{name}": shape for name, shape in shapes.items()}
    tensors = {f"model.{n}.weight": normal(*s) for n, s in tensors.items()}
    return tensors | ({"lm_head.weight": normal(11, 8)} if own_head else {})


@pytest.mark.parametrize("own_head", [True, False])
def test_hugging_face_names_return(own_head):
    tensors = _checkpoint(own_head=own_head)
    params = packing.from_hugging_face(tensors, 2)
    assert ("head" in params) is own_head
    again = packing.to_hugging_face(params, 6, 2)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor)


def test_the_prefix_may_be_absent():
    tensors = _checkpoint()
    bare = {name.removeprefix("model."): x for name, x in tensors.items()}
    a, b = (packing.from_hugging_face(t, 2) for t in (tensors, bare))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_matrices_become_in_by_out():
    tensors = _checkpoint(1)
    layer = packing.from_hugging_face(tensors, 1)["layers"][0]
    wanted = tensors["model.layers.0.self_attn.k_proj.weight"].T
    np.testing.assert_array_equal(layer["attention"]["qkv"][:, 12:16], wanted)
    assert layer["attention"]["out"].shape == (12, 8)
    assert layer["mlp"]["down"].shape == (10, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packing.pack_qkv(np.ones((3, 4)), np.ones((2, 2)), np.ones((2, 2))),
         r"pack_qkv: k and v .* got \(3, 4\), \(2, 2\) and \(2, 2\)"),
        (lambda: packing.unpack_qkv(np.ones((3, 7)), 2, 1),
         r"unpack_qkv: the columns of qkv must be a multiple of 4"),
        (lambda: packing.pack_gate_up(np.ones((3, 4)), np.ones((3, 5))),
         r"pack_gate_up: gate and up must have one shape, got \(3, 4\) and \(3, 5\)"),
        (lambda: packing.unpack_gate_up(np.ones((3, 5))),
         r"unpack_gate_up: gate_up must have shape \[H, 2, I\], got \(3, 5\)"),
        (lambda: packing.to_half_split(np.ones((3, 6)), 2),
         r"to_half_split: axis -1 of weight must hold 2 heads of an even width"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
