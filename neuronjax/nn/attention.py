"""Causal self-attention with grouped key/value heads as a layer."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.attention_options import (
    AttentionOptions,
    attend,
    attend_by_row,
    decode_window,
    require_by_row,
    require_decoding,
    segment_bounds,
)
from neuronjax.nn.cache import LayerCache
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_from_zero,
    require_multiple,
    require_sizes,
)
from neuronjax.primitives.attention.decode import attention_tkg_fwd_kernel
from neuronjax.primitives.output_projection import output_projection_cte
from neuronjax.primitives.qkv import qkv


class Attention(nnx.Module):
    """RMSNorm and QKV with rotary embedding, attention, output projection.

    The twin of `neuronjax.qkv`, `attention_cte` (or `AttentionTkgFwd` with a cache) and
    `output_projection_cte`, in that order.

    Args:
        d_model: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` is a multiple of it.
        head_dim: width of a head.
        norm: fuse an RMSNorm in front.
        norm_eps: added to the mean square.
        causal: a query sees keys up to its own position, else all.
        sliding_window: a query sees the last keys, so many, its own included.
        sink: each head has one more score, a parameter, without a key: `sink`.
        logits_soft_cap: `c`: scores are squashed, `c * tanh(score / c)`.
        dropout_rate: in training a weight is dropped with this probability, with keys
            of the stream `"dropout"` of `rngs`. `eval()` turns it off, `train()` on.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    The columns of `qkv` (all query heads, then key heads, then value heads) carry the
    partition names `(None, "tensor")`, the rows of `out` `("tensor", None)`, the sink
    `("tensor",)`.

    Raises:
        ValueError: a setting is out of range; when called, what the functions refuse.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from neuronjax.nn.rotary import rotary_tables
        >>> layer = Attention(8, 2, 1, 4, sliding_window=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8)), *rotary_tables(jnp.arange(3)[None], 4)).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm: bool = True,
        norm_eps: float = 1e-6,
        causal: bool = True,
        sliding_window: int | None = None,
        sink: bool = False,
        logits_soft_cap: float | None = None,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        require_sizes("Attention", **sizes, head_dim=head_dim)
        require_multiple(
            "Attention", "num_heads", num_heads, "num_kv_heads", num_kv_heads
        )
        require_from_zero("Attention", norm_eps=norm_eps)
        require_dtypes("Attention", dtype, param_dtype)
        settings = causal, sliding_window, logits_soft_cap, dropout_rate
        self.options = AttentionOptions(*settings)
        init, ones = nnx.initializers.lecun_normal(), nnx.initializers.ones_init()
        columns, inner = (num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim
        split, rows = (None, "tensor"), ("tensor", None)
        self.qkv = parameter(init, (d_model, columns), split, rngs, param_dtype)
        self.out = parameter(init, (inner, d_model), rows, rngs, param_dtype)
        gain = parameter(ones, (d_model,), (None,), rngs, param_dtype)
        self.norm = gain if norm else None
        logit = nnx.initializers.zeros_init(), (num_heads,), ("tensor",)
        self.sink = parameter(*logit, rngs, param_dtype) if sink else None
        self.dropout = rngs.dropout.fork() if dropout_rate else None
        self.deterministic = False
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.norm_eps, self.dtype = head_dim, norm_eps, dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"] | None,
        sin: Float[Array, "batch seq head_dim"] | None,
        segments: Int[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """Attends within `x`: training and scoring.

        Args:
            x: `[batch, seq, d_model]`.
            cos: `[batch, seq, head_dim]`; `None` for no rotation, and so `sin`.
            sin: like `cos`.
            segments: packed sequences: tokens see those of the same number next to
                them; a number that comes again later is another segment.
        """
        return self.prefill(x, cos, sin, segments)[0]

    def prefill(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"] | None,
        sin: Float[Array, "batch seq head_dim"] | None,
        segments: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Array, Array, Array]:
        """The same, and the keys and values `[batch, num_kv_heads, seq, head_dim]`."""
        if segments is not None:
            require_by_row("segments", segments, x.shape[:2])
        heads = self._heads(x, cos, sin)
        seen = self._seen()
        if segments is None:
            out = attend(heads, self.options, **seen)
        else:
            bounds = segment_bounds(segments)
            out = attend_by_row(heads, self.options, **seen, bounds=bounds)
        return self._out(out), heads[1], heads[2]

    def extend(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"] | None,
        sin: Float[Array, "batch seq head_dim"] | None,
        cache: LayerCache,
        lengths: Int[Array, " batch"],
    ) -> tuple[Array, LayerCache]:
        """Prefill behind a prefix: `x` sees `lengths[b]` cached tokens and itself.

        For many new tokens, as `decode` is for few.

        Returns the output, and the cache with the new tokens from slot `lengths[b]` on.
        """
        require_by_row("lengths", lengths, x.shape[:1])
        heads = self._heads(x, cos, sin)
        seen = self._seen()
        prior = cache.key, cache.value, lengths
        out = attend_by_row(heads, self.options, **seen, prior=prior)
        return self._out(out), cache.write(heads[1], heads[2], lengths)

    def decode(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"] | None,
        sin: Float[Array, "batch seq head_dim"] | None,
        cache: LayerCache,
        lengths: Int[Array, " batch"],
    ) -> tuple[Array, LayerCache]:
        """Attends to `lengths[b]` cached tokens and, causally, to `x`.

        Returns the output, and the cache with the new tokens from slot `lengths[b]` on.

        Raises:
            ValueError: the layer is not causal, caps its scores, or drops weights.
        """
        require_decoding(self.options, dropping=self._is_dropping())
        require_by_row("lengths", lengths, x.shape[:1])
        query, key, value = self._heads(x, cos, sin)
        starts, mask = decode_window(self.options, lengths, x.shape[1], self.num_heads)
        sink = self._sink()
        out = attention_tkg_fwd_kernel(
            query * jnp.asarray(self.head_dim**-0.5, query.dtype),
            key,
            value,
            cache.key,
            cache.value,
            mask=mask,
            lengths=lengths,
            start_pos_ids=starts,
            sink=None if sink is None else sink[:, None],
        )
        return self._out(out), cache.write(key, value, lengths)

    @property
    def is_plainly_causal(self) -> bool:
        """Whether it has no option: no window, sink, cap or dropout, and is causal."""
        return self.options == AttentionOptions() and self.sink is None

    def set_attributes_of(self, layer: "Attention") -> None:
        """Takes over everything of `layer` but its projections."""
        self.norm, self.sink, self.dropout = layer.norm, layer.sink, layer.dropout
        self.options, self.deterministic = layer.options, layer.deterministic
        self.num_heads, self.num_kv_heads = layer.num_heads, layer.num_kv_heads
        self.head_dim, self.norm_eps = layer.head_dim, layer.norm_eps
        self.dtype = layer.dtype

    def _is_dropping(self) -> bool:
        return self.dropout is not None and not self.deterministic

    def _dropout_key(self) -> Array | None:
        if self.dropout is None or self.deterministic:
            return None
        return self.dropout()

    def _seen(self) -> dict[str, Any]:
        """What prefill attention takes beside the heads and the options."""
        return dict(sink=self._sink(), dropout_key=self._dropout_key())

    def _sink(self) -> Array | None:
        return None if self.sink is None else at_dtype(self.sink, self.dtype)

    def _heads(self, x, cos, sin) -> tuple[Array, Array, Array]:
        """Query, key and value, each `[batch, heads, seq, head_dim]`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        gamma = None if self.norm is None else at_dtype(self.norm, self.dtype)[None]
        options = dict(
            norm_eps=self.norm_eps,
            fused_rope=cos is not None or sin is not None,
            cos_cache=cos,
            sin_cache=sin,
            d_head=self.head_dim,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
        )
        fused = self._project(x, gamma, options)
        count = self.num_heads + 2 * self.num_kv_heads
        heads = fused.reshape(*x.shape[:2], count, self.head_dim)
        ends = [self.num_heads, self.num_heads + self.num_kv_heads]
        query, key, value = jnp.split(heads, ends, 2)
        front = functools.partial(jnp.moveaxis, source=2, destination=1)
        return front(query), front(key), front(value)

    def _project(self, x, gamma, options: dict[str, Any]) -> Array:
        """The fused projection `[batch, seq, heads * head_dim]`."""
        return qkv(
            x,
            at_dtype(self.qkv, self.dtype),
            fused_norm_type="NO_NORM" if gamma is None else "RMS_NORM",
            gamma_norm_weights=gamma,
            **options,
        )

    def _out(self, heads: Float[Array, "batch heads head_dim seq"]) -> Array:
        """The output projection, `[batch, seq, d_model]`."""
        return output_projection_cte(heads, at_dtype(self.out, self.dtype))
