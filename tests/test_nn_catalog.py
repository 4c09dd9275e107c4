"""Every forward NAME of the catalog has a layer that emits it, or a reason for none."""

import functools

import jax.numpy as jnp
import pytest

import neuronjax
from neuronjax import nn
from neuronjax.nn.attention_options import AttentionOptions
from neuronjax.nn.twins import WITHOUT_LAYER
from neuronjax.primitives.registry import CATALOG
from tests.nn_case import CASES
from tests.nn_twins import HEAD_DIM, WIDTH, draw


def is_backward(name: str) -> bool:
    return "Bwd" in name or name.startswith("Backwards")


FORWARD = {name for name in CATALOG if not is_backward(name)}


def extended(causal):
    """Attention behind a cached prefix: the form of a NAME without the swap."""
    layer = CASES["Attention"].make_new()
    layer.options = AttentionOptions(causal=causal)
    cache = nn.LayerCache.zeros(1, 1, HEAD_DIM, 4, jnp.float32)
    x, used = draw(1, 2, WIDTH), jnp.array([1], jnp.int32)
    return neuronjax.trace(lambda x: layer.extend(x, None, None, cache, used)[0], x)


def emitted(labels):
    """The NAMEs of a call of each of these layers, and of attention behind a prefix."""
    names = {*extended(True).names, *extended(False).names}
    for case in map(CASES.__getitem__, labels):
        call = functools.partial(case.call, case.make_new())
        names |= set(neuronjax.trace(call, *case.inputs).names)
    return names


def test_every_forward_name_has_a_layer_or_a_reason():
    names = emitted(CASES)
    with neuronjax.target("gen2"):  # it has NAMEs of its own for attention
        names |= emitted(label for label in CASES if label.startswith("Attention"))
    assert names & WITHOUT_LAYER.keys() == set(), "a reason for what a layer emits"
    assert names | WITHOUT_LAYER.keys() == FORWARD


def test_the_target_chooses_among_names():
    with neuronjax.target("gen2"):
        assert "V2AttentionMMSoftmaxMMWithoutSwap" in extended(False).names
    assert "AttentionMMSoftmaxMMWithoutSwap" in extended(False).names


@pytest.mark.parametrize("name", WITHOUT_LAYER)
def test_a_reason_is_a_sentence_about_a_name_of_the_catalog(name):
    assert name in FORWARD and len(WITHOUT_LAYER[name].split()) > 6
