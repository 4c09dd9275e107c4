"""The rules of QKV calls: one row each, for the public functions and the emitters."""

import jax.numpy as jnp

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.known import is_epsilon
from neuronjax.primitives.options import (
    NormType,
    QKVOutputLayout,
    QuantizationType,
    members,
)
from neuronjax.primitives.qkv.facts import (
    ALL,
    ARGUMENTS,
    EMITTERS,
    OPERANDS,
    PUBLIC,
    ROTATING,
    SPLIT_TOKENS,
    all_given,
    arguments,
    both,
    chunked,
    counts,
    nbsd,
    shapes,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

_HINTS = (
    "store_output_in_sbuf",
    "output_in_sbuf",
    "use_auto_allocation",
    "load_input_with_DMA_transpose",
)


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage = kwargs.pop("stage", 2)
    text = message if kwargs.get("literal") else "{function}: " + message
    contracts.add(
        Contract(f"qkv.{rule}", functions, text, *args, stage=stage, **kwargs)
    )


for _function, _names in ARGUMENTS.items():
    contracts.add(
        contracts.all_or_none_tiles(
            _function,
            [_names[key] for key in OPERANDS if key in _names],
            lambda function: arguments(
                x=MemrefTile.from_tensor(jnp.zeros((1, 2, 8)), 2)
            )(function),
        )
    )
contracts.add(*only_flags(*PUBLIC, "qkv_fused_add_kernel"))
for _emitter in EMITTERS:
    contracts.add(only_hints(_emitter, arguments(), _HINTS))
_row(
    "rank",
    ALL,
    "{arg.x} must have shape [B, S, H] and {arg.w} [H, I], got {shape.x} and {shape.w}",
    lambda c: not c.ranked,
    example=arguments(x=(2, 8)),
    stage=1,
)
_row(
    "layout",
    ALL,
    "{arg.layout} must be BSD or NBSd, got {output_layout}",
    lambda c: c.layout not in (QKVOutputLayout.BSD, QKVOutputLayout.NBSd),
    example=arguments(layout="NBdS"),
    stage=1,
)
_row(
    "norm",
    ALL,
    f"{{arg.norm}} must be one of {members(NormType)}, got {{norm_given!r}}",
    lambda c: c.norm is None,
    example=arguments(norm="BATCH_NORM"),
    stage=1,
)
_row(
    "quantization",
    ALL,
    f"quantization_type must be one of {members(QuantizationType)}, "
    "got {quantization_type}",
    lambda c: c.quantization is None,
    example=arguments(quantization_type="INT3"),
    stage=1,
)
_row(
    "static",
    ALL,
    "{arg.eps}, hidden_actual, d_head and head counts must be Python numbers, known "
    "while tracing, got {traced}",
    lambda c: c.traced,
    example=arguments(d_head=(1,)),
    stage=1,
)
_row(
    "eps",
    ALL,
    "{arg.eps} must be finite and at least 0, got {eps_given}",
    lambda c: not c.traced and not is_epsilon(c.eps_given),
    example=arguments(eps=-1.0),
    stage=1,
)
_row(
    "dtype",
    ALL,
    "operands must be floating and at least 16 bits wide, got {floats}",
    lambda c: c.floats,
    example=lambda function: arguments(w=jnp.zeros((8, 16), jnp.int8))(function),
    stage=1,
)
_row(
    "tile_axis",
    EMITTERS,
    "a tile must lie on its axis: {off_axis}",
    lambda c: c.off_axis,
    example=lambda function: arguments(
        tiles=True, w=MemrefTile.from_tensor(jnp.zeros((8, 16)), 1)
    )(function),
    stage=1,
)
_row(
    "rows",
    ALL,
    "{arg.w} must have H = {H} rows, as many as {arg.x} has columns, got {shape.w}",
    lambda c: not c.is_mx and c.shape.w[0] != c.H,
    example=arguments(w=(6, 16)),
)
_row(
    "positive",
    ALL,
    "d_head, num_q_heads and num_kv_heads must be positive, got {d_head}, "
    "{num_q_heads} and {num_kv_heads}",
    lambda c: any(n is not None and n < 1 for n in counts(c)),
    example=arguments(d_head=0),
)
_row(
    "heads",
    ALL,
    "(num_q_heads + 2*num_kv_heads)*d_head must be I = {I}, the columns of {arg.w}, "
    "got ({num_q_heads} + 2*{num_kv_heads})*{d_head}",
    lambda c: all_given(c) and (c.num_q_heads + 2 * c.num_kv_heads) * c.d_head != c.I,
    example=arguments(d_head=4, num_q_heads=3, num_kv_heads=1),
)
_row(
    "d_head",
    ALL,
    "d_head must divide I = {I}, the columns of {arg.w}, got {d_head}",
    lambda c: (c.d_head or 0) > 0 and c.I % c.d_head,
    example=arguments(d_head=5),
)
_row(
    "split",
    ALL,
    "d_head must be given for {arg.layout} NBSd",
    lambda c: c.layout is QKVOutputLayout.NBSd and c.d_head is None,
    example=arguments(layout="NBSd"),
)
_row(
    "bias",
    ALL,
    "{arg.bias} must have shape (1, I) = (1, {I}), got {shape.bias}",
    lambda c: c.bias is not None and c.shape.bias != (1, c.I),
    example=arguments(bias=(16,)),
)
_row(
    "residuals",
    PUBLIC,
    "{arg.mlp_prev} and {arg.attn_prev} must be given exactly when {arg.flag} is set",
    lambda c: {c.mlp_prev is not None, c.attn_prev is not None} != {bool(c.flag)},
    example=arguments(flag=True, mlp_prev=(1, 2, 8)),
)
_row(
    "fused_add",
    ("qkv_fused_add_kernel",),
    "Fused add requires both mlp_out and attn_out to be provided or neither of them",
    lambda c: (c.mlp_prev is None) != (c.attn_prev is None),
    example=arguments(mlp_prev=(1, 2, 8)),
    literal=True,
)
_row(
    "residual_shape",
    (*PUBLIC, "qkv_fused_add_kernel"),
    "{arg.mlp_prev} and {arg.attn_prev} must have the shape of {arg.x}, {shape.x}, got "
    "{shape.mlp_prev} and {shape.attn_prev}",
    lambda c: (
        both(c.mlp_prev, c.attn_prev)
        and {c.shape.mlp_prev, c.shape.attn_prev} != {c.shape.x}
    ),
    example=lambda function: arguments(
        **({} if function in EMITTERS else dict(flag=True)),
        mlp_prev=(1, 2, 8),
        attn_prev=(1, 8),
    )(function),
)
_row(
    "gain",
    ALL,
    "{arg.gamma} must be given for {arg.norm} RMS_NORM and LAYER_NORM, and only then",
    lambda c: (
        (c.gamma is not None) != (c.norm in (NormType.RMS_NORM, NormType.LAYER_NORM))
    ),
    example=arguments(norm="RMS_NORM"),
)
_row(
    "gain_shape",
    ALL,
    "{arg.gamma} must have shape (1, H) = (1, {H}), got {shape.gamma}",
    lambda c: c.gamma is not None and c.shape.gamma != (1, c.H),
    example=arguments(norm="RMS_NORM", gamma=(8,)),
)
_row(
    "offset",
    ALL,
    "{arg.beta} is for {arg.norm} LAYER_NORM only",
    lambda c: c.beta is not None and c.norm is not NormType.LAYER_NORM,
    example=arguments(beta=(1, 8)),
)
_row(
    "offset_shape",
    ALL,
    "{arg.beta} must have shape (1, H) = (1, {H}), got {shape.beta}",
    lambda c: c.beta is not None and c.shape.beta != (1, c.H),
    example=arguments(norm="LAYER_NORM", gamma=(1, 8), beta=(8, 1)),
)
_row(
    "hidden_actual",
    ALL,
    "hidden_actual must lie between 1 and H = {H}, got {hidden_actual}",
    lambda c: c.hidden_actual is not None and not 1 <= c.hidden_actual <= c.H,
    example=arguments(hidden_actual=9),
)
_row(
    "tables",
    ROTATING,
    "{arg.cos} and {arg.sin} must be given both or neither, and exactly when "
    "fused_rope is set",
    lambda c: {c.cos is not None, c.sin is not None} != {bool(c.rope)},
    example=arguments(cos=(1, 2, 4), d_head=4),
)
_row(
    "rope_heads",
    ROTATING,
    "the rotary embedding needs d_head, even, num_q_heads and num_kv_heads, got "
    "{d_head}, {num_q_heads} and {num_kv_heads}",
    lambda c: c.cos is not None and (not all_given(c) or c.d_head % 2),
    example=arguments(cos=(1, 2, 4), sin=(1, 2, 4), d_head=4),
)
_row(
    "table_shape",
    ROTATING,
    "{arg.cos} and {arg.sin} must have shape (B, S, d_head) = ({B}, {S}, {d_head}), "
    "got {shape.cos} and {shape.sin}",
    lambda c: (
        both(c.cos, c.sin) and {c.shape.cos, c.shape.sin} != {(c.B, c.S, c.d_head)}
    ),
    example=lambda function: arguments(
        **({} if function in EMITTERS else dict(fused_rope=True)),
        cos=(1, 2, 2),
        sin=(1, 2, 2),
        d_head=4,
        num_q_heads=2,
        num_kv_heads=1,
    )(function),
)
_row(
    "chip_width",
    ALL,
    "the chip takes H in multiples of 128 for {arg.x}, got {shape.x}",
    size=Size("H", lambda c: c.H, multiple=PARTITIONS),
    example=arguments(),
    tag="hw",
    stage=3,
)
_row(
    "chip_prefill_width",
    ROTATING,
    "the chip's prefill path takes H up to 24576 for {arg.x}, got {shape.x}",
    size=Size("H", lambda c: c.H if c.prefill else 1, maximum=24576),
    example=lambda function: shapes(function, (1, 200, 24704), (24704, 16)),
    tag="hw",
    stage=3,
)
_row(
    "chip_prefill_columns",
    ROTATING,
    "the chip's prefill path takes I up to 4096 for {arg.w}, got {shape.w}",
    size=Size("I", lambda c: c.I if c.prefill else 1, maximum=4096),
    example=lambda function: shapes(function, (1, 200, 8), (8, 4224)),
    tag="hw",
    stage=3,
)
_row(
    "chip_prefill_heads",
    ROTATING,
    "the chip's prefill path takes d_head = 128 for NBSd, got {d_head}",
    size=Size("d_head", lambda c: nbsd(c, c.prefill), multiple=128, maximum=128),
    example=arguments(x=(1, 200, 8), layout="NBSd", d_head=4),
    tag="hw",
    stage=3,
)
_row(
    "chip_skip_gamma",
    ("qkv", "qkv_tkg"),
    "the chip's decode path has no {arg.norm} RMS_NORM_SKIP_GAMMA",
    lambda c: not c.prefill and c.norm is NormType.RMS_NORM_SKIP_GAMMA,
    example=arguments(norm="RMS_NORM_SKIP_GAMMA"),
    tag="hw",
    stage=3,
)
_row(
    "chip_odd_rows",
    ("qkv", "qkv_tkg"),
    "the chip's decode path adds residuals before a norm for an even B*S only, above "
    "18 (RMS_NORM) or 10 (LAYER_NORM), got {shape.x}",
    lambda c: (
        not c.prefill
        and c.flag
        and c.norm in SPLIT_TOKENS
        and c.B * c.S > SPLIT_TOKENS[c.norm]
        and c.B * c.S % 2
    ),
    example=arguments(
        x=(1, 19, 8),
        mlp_prev=(1, 19, 8),
        attn_prev=(1, 19, 8),
        flag=True,
        norm="RMS_NORM",
        gamma=(1, 8),
    ),
    tag="hw",
    stage=3,
)
_row(
    "chip_output",
    ("qkv", "qkv_cte"),
    "the chip's prefill path leaves no output on chip: store_output_in_sbuf",
    lambda c: c.prefill and c.store_output_in_sbuf,
    example=arguments(x=(1, 200, 8), store_output_in_sbuf=True),
    tag="hw",
    stage=3,
)
_row(
    "tile_columns",
    EMITTERS,
    "a tile's columns I fill whole partitions: at most 128 or a multiple, "
    "got {shape.w}",
    size=Size(
        "I",
        lambda c: chunked(c.I, c.tiled and c.layout is QKVOutputLayout.BSD),
        multiple=PARTITIONS,
    ),
    example=arguments(tiles=True, w=(8, 160)),
    tag="hw",
    stage=3,
)
_row(
    "tile_heads",
    EMITTERS,
    "a tile's heads fill whole partitions: d_head at most 128 or a multiple, "
    "got {d_head}",
    size=Size(
        "d_head",
        lambda c: chunked(nbsd(c, True), c.tiled),
        multiple=PARTITIONS,
    ),
    example=arguments(tiles=True, w=(8, 320), d_head=160, layout="NBSd"),
    tag="hw",
    stage=3,
)
