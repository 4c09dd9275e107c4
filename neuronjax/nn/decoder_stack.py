"""All layers of a dense decoder as one layer: one macro over whole sequences."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neuronjax.nn.cache import LayerCache
from neuronjax.nn.decode_tokens import new_tokens
from neuronjax.nn.parameter import at_dtype, parameter
from neuronjax.nn.settings import (
    require_dtypes,
    require_even,
    require_from_zero,
    require_multiple,
    require_sizes,
)
from neuronjax.primitives.llama3_transformer import llama3_transformer
from neuronjax.primitives.mesh_axes import bound_size
from neuronjax.primitives.transformer_tkg import transformer_tkg


class DecoderStack(nnx.Module):
    """The twin of `neuronjax.llama3_transformer`; decoding that of `transformer_tkg`.

    Every weight has all layers, on its first axis. `models.Llama` is a list, a scan or
    such a stack of `DecoderLayer`s, whose columns of `qkv` lie by kind; here they lie
    as both functions take them, one key/value head after another: its query heads, the
    key head and the value head.

    Args:
        d_model: width of the residual stream.
        d_ff: width of the MLP between its projections.
        num_layers: layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; `num_heads` is a multiple of it.
        head_dim: width of a head, even.
        norm_eps: added to the mean square in all norms.
        axis: inside `shard_map`, the mesh axis of the ranks that share heads and
            columns, two all-reduces a layer. Outside of it one rank has all.
        dtype: dtype of the computation; `None` keeps that of the input.
        param_dtype: dtype of the parameters.
        rngs: where the initial values come from.

    `qkv`, `gate` and `up` carry the partition names `(None, None, axis)`, `out` and
    `down` `(None, axis, None)`, with `"tensor"` for `axis` unless it is named.

    Raises:
        ValueError: a setting is out of range; when called, what the functions refuse.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from neuronjax.nn import rotary_tables
        >>> stack = DecoderStack(8, 12, 2, 2, 1, 4, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((1, 3, 8)), *rotary_tables(jnp.arange(3)[None], 4)).shape
        (1, 3, 8)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        norm_eps: float = 1e-6,
        axis: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = dict(d_model=d_model, d_ff=d_ff, num_layers=num_layers)
        sizes |= dict(num_heads=num_heads, num_kv_heads=num_kv_heads)
        require_sizes("DecoderStack", **sizes, head_dim=head_dim)
        require_even("DecoderStack", "head_dim", head_dim)
        require_multiple(
            "DecoderStack", "num_heads", num_heads, "num_kv_heads", num_kv_heads
        )
        require_from_zero("DecoderStack", norm_eps=norm_eps)
        require_dtypes("DecoderStack", dtype, param_dtype)
        name = axis or "tensor"
        columns, rows = (None, None, name), (None, name, None)
        inner, heads = num_heads * head_dim, num_heads + 2 * num_kv_heads
        init = nnx.initializers.lecun_normal(batch_axis=0)

        def weight(d_in: int, d_out: int, names: tuple[str | None, ...]) -> nnx.Param:
            return parameter(init, (num_layers, d_in, d_out), names, rngs, param_dtype)

        self.qkv = weight(d_model, heads * head_dim, columns)
        self.out = weight(inner, d_model, rows)
        self.gate, self.up = (weight(d_model, d_ff, columns) for _ in range(2))
        self.down = weight(d_ff, d_model, rows)
        ones = nnx.initializers.ones_init()
        gains = (num_layers, d_model), (None, None), rngs, param_dtype
        self.attention_norm = parameter(ones, *gains)
        self.mlp_norm = parameter(ones, *gains)
        self.num_layers, self.norm_eps = num_layers, norm_eps
        self.axis, self.dtype = axis, dtype

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
    ) -> Float[Array, "batch seq d_model"]:
        """All layers over whole sequences; the tables' halves are equal."""
        return self._over(x, cos, sin)

    def prefill(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
        slots: int,
    ) -> tuple[Array, LayerCache]:
        """The same, and a cache with a leading axis of layers, `slots` long.

        Raises:
            ValueError: there are fewer slots than tokens.
        """
        spare = slots - x.shape[1]
        if spare < 0:
            raise ValueError(
                f"nn.DecoderStack: slots must be at least seq = {x.shape[1]}, "
                f"got {slots}"
            )
        out, key, value = self._over(x, cos, sin, output_kv=True)
        empty, more = [(0, 0)] * 3, (0, spare)
        key = jnp.pad(key, [*empty, (0, 0), more])
        return out, LayerCache(key, jnp.pad(value, [*empty, more, (0, 0)]))

    def decode(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "batch seq head_dim"],
        sin: Float[Array, "batch seq head_dim"],
        cache: LayerCache,
        lengths: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch seq d_model"], LayerCache]:
        """All layers over new tokens, behind `lengths[b]` cached ones.

        A row needs room for the new tokens: one without, under `jit`, is written
        nothing, and sees its first `slots - seq` slots. Donate the cache to `jit` to
        have it updated in place.
        """
        x = x if self.dtype is None else x.astype(self.dtype)
        slots, seq = cache.value.shape[3], x.shape[1]
        tokens = new_tokens("DecoderStack", (cos, sin), lengths, seq, slots)
        ranks = self._ranks()
        out, key, value = transformer_tkg(
            x,
            *self._weights(),
            cache.key,
            cache.value,
            tokens.cos,
            tokens.sin,
            tokens.mask,
            None,
            tokens.position,
            self.num_layers,
            self.norm_eps,
            None if ranks is None else [list(range(ranks))],
            axis=None if ranks is None else self.axis,
        )
        return out, LayerCache(key, value)

    def _over(self, x, cos, sin, **options: Any) -> Any:
        half = cos.shape[-1] // 2
        return llama3_transformer(
            x if self.dtype is None else x.astype(self.dtype),
            *self._weights(),
            *(jnp.moveaxis(table[..., :half], -1, 0) for table in (cos, sin)),
            eps=self.norm_eps,
            axis=None if self._ranks() is None else self.axis,
            **options,
        )

    def _weights(self) -> list[Array]:
        """In the order of both functions."""
        projections = self.qkv, self.out, self.gate, self.up, self.down
        gains = self.attention_norm, self.mlp_norm
        return [
            *(at_dtype(weight, self.dtype) for weight in projections),
            *(at_dtype(gain, self.dtype)[:, None] for gain in gains),
        ]

    def _ranks(self) -> int | None:
        return bound_size(self.axis)
