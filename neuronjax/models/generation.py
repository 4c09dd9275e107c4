"""Generation: prefill once, then one token a step, sampled on the device."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from neuronjax.models.cache import Cache
from neuronjax.models.config import DecoderConfig

# Prompts and caches are padded to multiples of this: one compilation serves many
# lengths.
GRAIN = 64


class Decoder(Protocol):
    """What `generate` needs of a model, which is an NNX module besides."""

    config: DecoderConfig

    def prefill(self, tokens: Array, lengths: Array, slots: int) -> tuple[Array, Cache]:
        """Reads prompts into a new cache; see `Llama.prefill`."""
        ...

    def decode(self, tokens: Array, cache: Any) -> tuple[Array, Cache]:
        """Reads more tokens of each row; see `Llama.decode`."""
        ...


class Generates:
    """The method `generate` of a decoder."""

    def generate(
        self: Decoder,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_ids: Sequence[int] | None = None,
        stream: Callable[[list[int | None]], None] | None = None,
    ) -> list[list[int]]:
        """Continues prompts; see `neuronjax.models.generation.generate`.

        Without `eos_ids` those of the model's configuration end a row.
        """
        return generate(
            self,
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            eos_ids=self.config.eos_ids if eos_ids is None else eos_ids,
            stream=stream,
        )


def require_tokens(function: str, tokens: Array, cache: Cache | None = None) -> None:
    """Refuses tokens that are not `[batch, seq]`, or not of the cache's rows."""
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ValueError(
            f"{function}: tokens must be of shape [batch, seq], seq at least 1, "
            f"got {tokens.shape}"
        )
    rows = tokens.shape[0] if cache is None else cache.lengths.shape[0]
    if tokens.shape[0] != rows:
        raise ValueError(
            f"{function}: tokens must have a row for each of the {rows} of the cache, "
            f"got {tokens.shape[0]}"
        )


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
    stream: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """Continues a batch of prompts, which may differ in length.

    Args:
        model: the decoder.
        prompts: token ids, one non-empty sequence a row.
        max_tokens: new tokens a row, at most.
        temperature: 0 takes the likeliest token; else logits are divided by it and a
            token is drawn.
        top_p: draw from the likeliest tokens that together hold this probability.
        seed: of the draws; the same seed gives the same text.
        eos_ids: a row ends with the first of these it meets, which is kept.
        stream: called after each step with one new token a row, `None` where a row has
            ended.

    Returns:
        The new tokens of each row.

    Raises:
        ValueError: a prompt is empty or holds an id outside the vocabulary, a setting
            is out of its range, or prompt and new tokens exceed the model's `max_seq`.
    """
    _check(model.config, prompts, max_tokens, temperature, top_p)
    graph, state = nnx.split(model)
    sampler = (jnp.float32(temperature or 1), jnp.float32(top_p), temperature == 0)
    key, draw = jax.random.split(jax.random.key(seed))
    logits, cache = _prefill(graph, state, *_padded(prompts, max_tokens))
    token = _sample(logits, draw, *sampler)
    made: list[list[int]] = [[] for _ in prompts]
    ended = [max_tokens == 0] * len(prompts)
    while True:
        _collect(np.asarray(token), made, ended, eos_ids, max_tokens, stream)
        if all(ended):
            return made
        key, draw = jax.random.split(key)
        token, cache = _step(graph, state, token, cache, draw, *sampler)


def _padded(prompts, max_tokens):
    """Tokens `[batch, seq]` padded on the right, their lengths, the cache size."""
    lengths = jnp.array([len(p) for p in prompts], jnp.int32)
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), _grain(longest)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths, _grain(longest + max_tokens)


def _grain(size: int) -> int:
    return -(-size // GRAIN) * GRAIN


def _check(config, prompts, max_tokens, temperature, top_p) -> None:
    for i, prompt in enumerate(prompts):
        outside = [t for t in prompt if not 0 <= t < config.vocab_size]
        if not prompt or outside:
            raise ValueError(
                f"generate: prompts[{i}] must hold ids in [0, {config.vocab_size}), "
                f"got {outside or 'none'}"
            )
        if len(prompt) + max_tokens > config.max_seq:
            raise ValueError(
                f"generate: prompts[{i}] and max_tokens must fit in max_seq = "
                f"{config.max_seq}, got {len(prompt)} + {max_tokens}"
            )
    ranges = {
        "prompts": (len(prompts), len(prompts) >= 1, "at least one prompt"),
        "max_tokens": (max_tokens, max_tokens >= 0, "at least 0"),
        "temperature": (temperature, temperature >= 0, "at least 0"),
        "top_p": (top_p, 0 < top_p <= 1, "in (0, 1]"),
    }
    for argument, (value, holds, expected) in ranges.items():
        if not holds:
            raise ValueError(f"generate: {argument} must be {expected}, got {value}")


def _collect(tokens, made, ended, eos_ids, max_tokens, stream) -> None:
    """Adds one token to each row that has not ended."""
    new: list[int | None] = []
    for i, token in enumerate(map(int, tokens)):
        new.append(None if ended[i] else token)
        if not ended[i]:
            made[i].append(token)
            ended[i] = token in eos_ids or len(made[i]) == max_tokens
    if stream is not None and any(t is not None for t in new):
        stream(new)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _prefill(graph, state, tokens, lengths, slots):
    return nnx.merge(graph, state).prefill(tokens, lengths, slots)


@functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=(3,))
def _step(graph, state, token, cache, key, temperature, top_p, greedy):
    logits, cache = nnx.merge(graph, state).decode(token[:, None], cache)
    return _sample(logits[:, 0], key, temperature, top_p, greedy), cache


@functools.partial(jax.jit, static_argnums=(4,))
def _sample(
    logits: Float[Array, "batch vocab"],
    key: Any,
    temperature: Array,
    top_p: Array,
    greedy: bool,
) -> Array:
    """One token a row, int32."""
    if greedy:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = logits / temperature
    ordered = jnp.sort(logits, -1, descending=True)
    share = jax.nn.softmax(ordered, -1)
    # The likeliest token always stays: what counts is the mass before it.
    kept = jnp.cumsum(share, -1) - share < top_p
    least = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
    drawn = jax.random.categorical(key, jnp.where(logits >= least, logits, -jnp.inf))
    return drawn.astype(jnp.int32)
