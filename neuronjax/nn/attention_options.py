"""What `nn.Attention` sees besides its heads: windows, caps, packing, prefixes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from neuronjax.nn.settings import require_positive, require_rate, require_sizes
from neuronjax.primitives.attention.prefill import attention_cte


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The settings of `attention_cte` that a layer keeps.

    Attributes:
        causal: a query sees keys up to its own position.
        sliding_window: of these the last ones, so many; `None` for all.
        logits_soft_cap: what scores are squashed below; `None` for nothing.
        dropout_rate: the probability with which a weight is dropped in training.
    """

    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    dropout_rate: float = 0.0

    def __post_init__(self):
        if self.sliding_window is not None:
            require_sizes("Attention", sliding_window=self.sliding_window)
            if not self.causal:
                raise ValueError(
                    "nn.Attention: sliding_window must be None without causal, got "
                    f"{self.sliding_window}"
                )
        if self.logits_soft_cap is not None:
            require_positive("Attention", logits_soft_cap=self.logits_soft_cap)
        require_rate("Attention", dropout_rate=self.dropout_rate)


def require_by_row(name: str, given: Any, shape: tuple[int, ...]) -> None:
    """Refuses what is not an array of integers with a row for each sequence."""
    dtype = getattr(given, "dtype", None)
    whole = dtype is not None and (
        jnp.dtype(dtype) == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer)
    )
    if not whole or given.shape != shape:
        got = type(given).__name__ if dtype is None else f"{dtype} {given.shape}"
        raise ValueError(
            f"nn.Attention: {name} must be integers of shape {shape}, got {got}"
        )


def segment_bounds(
    segments: Int[Array, "batch seq"],
) -> tuple[Int[Array, "batch seq 1"], Int[Array, "batch seq 1"]]:
    """The first position of each one's segment, and the one past its last."""
    length = segments.shape[1]
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
    changes = segments[:, 1:] != segments[:, :-1]
    edge = jnp.ones((segments.shape[0], 1), bool)
    starts = jnp.concatenate([edge, changes], 1)
    ends = jnp.concatenate([changes, edge], 1)
    first = lax.cummax(jnp.where(starts, place, 0), axis=1)
    last = lax.cummin(jnp.where(ends, place, length - 1), axis=1, reverse=True)
    return first[..., None], last[..., None] + 1


def attend(
    heads: tuple[Array, Array, Array],
    options: AttentionOptions,
    *,
    sink: Array | None,
    dropout_key: Array | None,
) -> Float[Array, "batch num_heads head_dim seq"]:
    """Attention within whole sequences, the batch folded into the heads."""
    query = heads[0]
    fold = (lax.collapse(t, 0, 2) for t in heads)
    sink = None if sink is None else jnp.tile(sink[:, None], (query.shape[0], 1))
    out = attention_cte(
        *fold, tp_k=True, sink=sink, **_settings(query, options, dropout_key)
    )
    return out.reshape(*query.shape[:2], query.shape[3], query.shape[2])


def attend_by_row(
    heads: tuple[Array, Array, Array],
    options: AttentionOptions,
    *,
    sink: Array | None,
    dropout_key: Array | None,
    bounds: tuple[Array, Array] | None = None,
    prior: tuple[Array, Array, Array] | None = None,
) -> Float[Array, "batch num_heads head_dim seq"]:
    """The same where each sequence has bounds, or a prefix, of its own.

    Args:
        heads: query, key and value, each `[batch, heads, seq, head_dim]`.
        options: the layer's.
        sink: `[num_heads]`.
        dropout_key: a key; each sequence gets one of its own.
        bounds: of packed sequences, as `segment_bounds` gives them.
        prior: cached keys `[batch, heads, head_dim, slots]`, values `[batch, heads,
            slots, head_dim]`, and how many slots count, `[batch]`.
    """
    sink = None if sink is None else sink[:, None]
    rows = heads[0].shape[0]
    keys = None if dropout_key is None else jax.random.split(dropout_key, rows)

    def one(query, key, value, bounds, prior, dropout_key):
        low, high = (None, None) if bounds is None else bounds
        k_prior, v_prior, used = (None, None, None) if prior is None else prior
        return attention_cte(
            query,
            jnp.swapaxes(key, 1, 2),
            value,
            k_prior=k_prior,
            v_prior=v_prior,
            prior_used_len=None if used is None else used[None],
            sink=sink,
            bound_min=low,
            bound_max=high,
            **_settings(query, options, dropout_key),
        )

    return jax.vmap(one)(*heads, bounds, prior, keys)


def decode_window(
    options: AttentionOptions, lengths: Int[Array, " batch"], seq: int, num_heads: int
) -> tuple[Int[Array, "batch seq"] | None, Bool[Array, "seq batch heads seq"] | None]:
    """The first cached slot that each new token sees, and which new ones it sees."""
    window = options.sliding_window
    if window is None:
        return None, None
    new = jnp.arange(seq, dtype=jnp.int32)
    ends = jnp.maximum(lengths.astype(jnp.int32), 0)[:, None]
    # A window among the new tokens has no slot; a start past the end would go around.
    starts = jnp.maximum(jnp.minimum(ends, ends + new - window + 1), 0)
    key, query = new[:, None], new[None, :]
    seen = (key <= query) & (key > query - window)
    shape = (seq, lengths.shape[0], num_heads, seq)
    return starts, jnp.broadcast_to(seen[:, None, None], shape)


def require_decoding(options: AttentionOptions, *, dropping: bool) -> None:
    """Refuses what `AttentionTkgFwd` does not compute."""
    refused = {
        "causal must be True": not options.causal,
        "logits_soft_cap must be None": options.logits_soft_cap is not None,
        "dropout_rate must be 0, or the layer deterministic": dropping,
    }
    for words, wrong in refused.items():
        if wrong:
            got = getattr(options, words.split()[0])
            raise ValueError(f"nn.Attention: to decode, {words}, got {got}")


def _settings(query, options: AttentionOptions, dropout_key) -> dict[str, Any]:
    return dict(
        scale=query.shape[-1] ** -0.5,
        causal_mask=options.causal,
        tp_out=True,
        sliding_window=options.sliding_window,
        logits_soft_cap=options.logits_soft_cap,
        dropout_rate=0.0 if dropout_key is None else options.dropout_rate,
        dropout_key=dropout_key,
    )
