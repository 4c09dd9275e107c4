"""Perplexity of a text under a decoder."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from neuronjax.models.llama import Llama


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The score of a text.

    Attributes:
        value: the exponential of the mean negative log-likelihood of a token, in nats.
        tokens: how many tokens were predicted.
    """

    value: float
    tokens: int


def perplexity(
    model: Llama,
    tokens: Sequence[int],
    *,
    window: int = 512,
    step: Callable[[int], None] | None = None,
) -> Perplexity:
    r"""Scores a text in windows that do not overlap.

    $$\mathrm{PPL} = \exp\Big(-\frac1n \sum_i \log p(t_i \mid t_{w(i)} \ldots t_{i-1})
      \Big)$$

    where $w(i)$ is the start of the window of token $i$: each window forgets the one
    before, but for its last token. Every token but the first of the text is predicted.

    Args:
        model: the decoder; logits and sums are float32.
        tokens: the text's token ids, at least two.
        window: how many tokens a window reads, at most the model's `max_seq`.
        step: called after each window with how many tokens it predicted.

    Returns:
        The perplexity, and how many tokens were predicted.

    Raises:
        ValueError: there are fewer than two tokens, an id is outside the vocabulary,
            or `window` is not between 1 and `max_seq`.

    Source:
        Jurafsky and Martin, Speech and Language Processing, 3rd edition, section 3.3.
    """
    ids = np.asarray(tokens, np.int32)
    _check(model, ids, window)
    graph, state = nnx.split(model)
    total, count = 0.0, ids.size - 1
    for start in range(0, count, window):
        part = ids[start : start + window + 1]
        size = part.size - 1
        padded = np.pad(part, (0, window - size))
        total += float(_loss(graph, state, padded[None], np.int32(size)))
        if step is not None:
            step(size)
    return Perplexity(math.exp(total / count), count)


def _check(model: Llama, ids: np.ndarray, window: int) -> None:
    config = model.config
    if ids.size < 2:
        raise ValueError(f"perplexity: tokens must be at least 2, got {ids.size}")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(
            f"perplexity: tokens must be ids in [0, {config.vocab_size}), got "
            f"{ids.min()} to {ids.max()}"
        )
    if not 1 <= window <= config.max_seq:
        raise ValueError(
            f"perplexity: window must be between 1 and max_seq = {config.max_seq}, "
            f"got {window}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _loss(graph: Any, state: Any, tokens: jax.Array, size: jax.Array) -> jax.Array:
    """The summed negative log-likelihood of the first `size` targets."""
    logits = nnx.merge(graph, state)(tokens[:, :-1])
    targets = tokens[:, 1:, None]
    picked = jnp.take_along_axis(logits, targets, -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - picked
    return jnp.where(jnp.arange(losses.shape[1]) < size, losses, 0).sum()
