"""The stacked layers of a dense decoder as one macro, `Llama3Transformer`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.nn.attention import Attention
from neuronjax.nn.cache import LayerCache
from neuronjax.nn.decoder_layer import DecoderLayer
from neuronjax.nn.mlp import MLP
from neuronjax.nn.parameter import at_dtype
from neuronjax.primitives.llama3_transformer import llama3_transformer


def require_dense(layer: Any) -> None:
    """Refuses a layer that the macro does not compute.

    Raises:
        ValueError: it is not attention and an MLP with SiLU, both with plain weights, a
            norm and one epsilon.
    """
    parts = getattr(layer, "attention", None), getattr(layer, "mlp", None)
    kinds = tuple(map(type, (layer, *parts)))
    if kinds != (DecoderLayer, Attention, MLP):
        found = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            "Llama: fused_stack needs layers that are DecoderLayer, Attention and MLP, "
            f"got {found}"
        )
    attention, mlp = parts
    settings = [mlp.activation in ("SiLU", "Swish"), mlp.norm_eps == attention.norm_eps]
    if not attention.is_plainly_causal:
        raise ValueError(
            "Llama: fused_stack needs attention without window, sink, soft cap and "
            f"dropout, got {attention.options}"
        )
    if not all(settings) or attention.norm is None or mlp.norm is None:
        raise ValueError(
            "Llama: fused_stack needs a norm in front of attention and MLP, both with "
            "one epsilon, and the activation SiLU"
        )


def fused_layers(
    layers: Any,
    x: Float[Array, "batch seq d_model"],
    cos: Float[Array, "batch seq head_dim"],
    sin: Float[Array, "batch seq head_dim"],
    *,
    output_kv: bool = False,
) -> Any:
    """All layers over whole sequences; with `output_kv` keys and values too.

    A computation's own dtype is that of all weights before the macro: with another
    dtype of the parameters both stacks exist.
    """
    require_dense(layers)
    attention, mlp = layers.attention, layers.mlp
    dtype, half = attention.dtype, attention.head_dim // 2
    x = x if dtype is None else x.astype(dtype)
    weights = (attention.qkv, attention.out, mlp.gate, mlp.up, mlp.down)
    gains = (at_dtype(part.norm, dtype)[:, None] for part in (attention, mlp))
    return llama3_transformer(
        x,
        *(at_dtype(w, dtype) for w in weights),
        *gains,
        *(jnp.moveaxis(table[..., :half], -1, 0) for table in (cos, sin)),
        eps=attention.norm_eps,
        qkv_order="kind",
        output_kv=output_kv,
    )


def filled(empty: Any, keys: Array, values: Array) -> LayerCache:
    """Stacked caches whose first slots are `keys` and `values`."""
    pads = (0, 0, 0, 0, empty.key.shape[-1] - keys.shape[-1])
    widths = [(0, more) for more in pads]
    swapped = [*widths[:3], widths[4], widths[3]]
    return LayerCache(
        jnp.pad(keys, widths).astype(empty.key.dtype),
        jnp.pad(values, swapped).astype(empty.value.dtype),
    )
