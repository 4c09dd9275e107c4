"""The macros of a Llama of given sizes, from shapes alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama
from neuronjax.tools.trace import Trace, trace


def trace_llama(
    config: LlamaConfig,
    *,
    batch: int = 1,
    seq: int = 128,
    dtype: Any = jnp.float32,
    gradient: bool = False,
) -> dict[str, Trace]:
    """The macros of each phase of a Llama; no weight is made.

    Args:
        config: its sizes.
        batch: rows.
        seq: tokens of the prompt, or of a training sequence.
        dtype: dtype of weights and arithmetic.
        gradient: trace the gradient of the next-token loss instead.

    Returns:
        A table by title: prefill and one decode step, or the gradient.
    """
    dtype = jnp.dtype(dtype)
    model = nnx.eval_shape(
        lambda: Llama(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def prefill(state, tokens, lengths):
        return nnx.merge(graph, state).prefill(tokens, lengths, seq + 1)

    def decode(state, tokens, cache):
        return nnx.merge(graph, state).decode(tokens, cache)

    if gradient:
        title = f"gradient of the loss, batch {batch}, {seq} tokens"
        return {title: trace(jax.grad(_loss(graph)), state, tokens)}
    _, cache = jax.eval_shape(prefill, state, tokens, lengths)
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return {
        f"prefill, batch {batch}, {seq} tokens": trace(prefill, state, tokens, lengths),
        f"one decode step after {seq} tokens": trace(decode, state, one, cache),
    }


def _loss(graph: Any) -> Callable:
    """The next-token loss as a function of parameters and tokens."""

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return loss
