"""What the stack and one of its layers read."""

from typing import Any, NamedTuple

# All query heads, key heads, value heads; or one key/value head after another, each as
# its query heads, its key and its value.
ORDERS = ("kind", "group")


class Operands(NamedTuple):
    """The operands of the stack in their order.

    `l` layers, `b` sequences, `s` positions, `h` width of the model, `i` of the MLP,
    `N` query heads and `G` key/value heads of width `d`. On ranks `N`, `G` and `i` are
    a rank's own.

    Attributes:
        x: `[b, s, h]`.
        w_qkv: `[l, h, (N + 2*G)*d]`.
        w_out: `[l, N*d, h]`.
        w_gate: `[l, h, i]`.
        w_up: `[l, h, i]`.
        w_down: `[l, i, h]`.
        gamma_qkv: `[l, 1, h]`, the gain of the norm in front of attention.
        gamma_mlp: `[l, 1, h]`, that of the norm in front of the MLP.
        cos: `[d/2, b, s]`.
        sin: `[d/2, b, s]`.
    """

    x: Any
    w_qkv: Any
    w_out: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    gamma_qkv: Any
    gamma_mlp: Any
    cos: Any
    sin: Any

    @property
    def layers(self) -> "Layer":
        """The weights of all layers."""
        return Layer(*self[1:8])


class Layer(NamedTuple):
    """The weights of one layer, or of all with a leading axis; as in `Operands`."""

    w_qkv: Any
    w_out: Any
    w_gate: Any
    w_up: Any
    w_down: Any
    gamma_qkv: Any
    gamma_mlp: Any


def head_counts(layer: Layer, head_dim: int) -> tuple[Any, Any]:
    """`(N, G)`: how many query heads and how many key/value heads a layer has."""
    num_heads = layer.w_out.shape[-2] // head_dim
    return num_heads, (layer.w_qkv.shape[-1] // head_dim - num_heads) // 2


def output_names(
    *, output_kv: bool, stored: bool = False, **config: Any
) -> tuple[str, ...]:
    """The outputs that a config gives."""
    kept = ("k", "v") if output_kv else ()
    return ("out", *kept, *(("layer_inputs",) if stored else ()))
