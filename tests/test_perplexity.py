"""Perplexity against its definition."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from neuronjax.models import Llama
from neuronjax.models.perplexity import perplexity
from tests.test_quantize import CONFIG


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


IDS = np.random.default_rng(0).integers(0, 61, 23).tolist()


@pytest.mark.parametrize("window", [1, 5, 11, 22, 64])
def test_every_token_but_the_first_is_predicted_within_its_window(model, window):
    losses = []
    for i in range(1, len(IDS)):
        seen = IDS[(i - 1) // window * window : i]
        # What comes after does not count: one length for all, one compilation.
        rows = jnp.array([seen + [0] * (len(IDS) - len(seen))])
        last = jax.nn.log_softmax(model(rows))[0, len(seen) - 1]
        losses.append(-float(last[IDS[i]]))
    steps = []
    score = perplexity(model, IDS, window=window, step=steps.append)
    assert score.tokens == len(IDS) - 1 == sum(steps)
    assert score.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_an_even_guess_has_the_perplexity_of_the_vocabulary(model):
    even = nnx.merge(*nnx.split(model))
    even.head[...] = jnp.zeros_like(even.head[...])
    assert perplexity(even, IDS, window=8).value == pytest.approx(61, rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "window", "words"),
    [
        ([1], 8, "tokens must be at least 2, got 1"),
        ([1, 61], 8, r"ids in \[0, 61\), got 1 to 61"),
        ([1, -1], 8, r"ids in \[0, 61\), got -1 to 1"),
        ([1, 2], 0, "window must be between 1 and max_seq = 256, got 0"),
        ([1, 2], 257, "window must be between 1 and max_seq = 256, got 257"),
    ],
)
def test_a_mistake_is_refused(model, tokens, window, words):
    with pytest.raises(ValueError, match=words):
        perplexity(model, tokens, window=window)
