"""The shapes of the operands of a small stack."""

from neuronjax.kernels.llama3_transformer.operands import Operands


def operand_shapes(
    batch: int, *, layers: int, d_model: int, head_dim: int, d_ff: int
) -> Operands:
    """Two positions; two query heads share a key/value head."""
    wide = 2 * head_dim
    return Operands(
        x=(batch, 2, d_model),
        w_qkv=(layers, d_model, wide + 2 * head_dim),
        w_out=(layers, wide, d_model),
        w_gate=(layers, d_model, d_ff),
        w_up=(layers, d_model, d_ff),
        w_down=(layers, d_ff, d_model),
        gamma_qkv=(layers, 1, d_model),
        gamma_mlp=(layers, 1, d_model),
        cos=(head_dim // 2, batch, 2),
        sin=(head_dim // 2, batch, 2),
    )
