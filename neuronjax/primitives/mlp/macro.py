"""The macros `MLP`, `TiledNativeKernelMLP` and `MLPBwd`: emitters and declarations.

Outputs carry the checkpoint names `mlp_out`, `mlp_added` (where the prologue's sum is
stored), `mlp_gate` and `mlp_up`: the pre-activations after the bias and before the
clamp, which are all that `MLPBwd` reads of the forward.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels.mlp import dense, plain
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.mlp import rules  # noqa: F401  enters the rows
from neuronjax.primitives.mlp.facts import LIMITS, TILE_AXES, facts, norm_word
from neuronjax.primitives.options import ActFnType, NormType, member
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

UNTILED, TILED, BACKWARD = "MLP", "TiledNativeKernelMLP", "MLPBwd"
Operand = Array | MemrefTile


@contracts.contracted(facts("mlp_kernel"))
def mlp_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    gate_b: Operand | None = None,
    up_b: Operand | None = None,
    down_b: Operand | None = None,
    fused_add: Operand | None = None,
    *,
    activation: ActFnType | str = "SiLU",
    norm: NormType | str = "none",
    eps: float = 1e-6,
    skip_gate: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    store_fused_add: bool = False,
    out_dtype: Any = None,
    **hints: Any,
) -> Operand | tuple[Operand, Operand]:
    """Emits `MLP`, or for tiles `TiledNativeKernelMLP`: norm, projections, activation.

    A tile lies on `H` (`hidden`, `gate_w`, `up_w`, `gamma`, `beta`, `down_b`,
    `fused_add`) or on `I` (`down_w`, `gate_b`, `up_b`).

    Args:
        hidden: `[B, S, H]` or `[T, H]`.
        gate_w: `[H, I]`; may be None with `skip_gate`, and is ignored then.
        up_w: `[H, I]`.
        down_w: `[I, H]`.
        gamma: the norm's gain, `[1, H]`.
        beta: LayerNorm's offset, `[1, H]`.
        gate_b: `[1, I]`.
        up_b: `[1, I]`.
        down_b: `[1, H]`.
        fused_add: `[B, S, H]`, added to `hidden` before the norm (`"prologue"`).
        activation: `SiLU`, `GELU`, `GELU_Tanh_Approx` or `Swish`.
        norm: `"none"`, `"rms"`, `"layer"`, `"rms_skip_gamma"`, or a `NormType`.
        eps: added to the mean square or variance.
        skip_gate: `act(up)` instead of `act(gate) * up`.
        gate_clamp_upper_limit: the gate's pre-activation is at most this.
        gate_clamp_lower_limit: and at least this.
        up_clamp_upper_limit: the same for up.
        up_clamp_lower_limit: the same for up.
        store_fused_add: return the prologue's sum too.
        out_dtype: dtype of the results; None for that of `hidden`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        An array or tile of the shape of `hidden`; with `store_fused_add` that and the
        sum.
    """
    call = SimpleNamespace(**locals())
    form = "none" if fused_add is None else "prologue"
    outs = _emit("mlp_kernel", call, form, addend=fused_add)
    return outs if store_fused_add else outs[0]


@contracts.contracted(facts("mlp_fused_add_kernel"))
def mlp_fused_add_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    mlp_out: Operand | None = None,
    attn_out: Operand | None = None,
    gamma: Operand | None = None,
    beta: Operand | None = None,
    gate_b: Operand | None = None,
    up_b: Operand | None = None,
    down_b: Operand | None = None,
    *,
    activation: ActFnType | str = "SiLU",
    norm: NormType | str = "none",
    eps: float = 1e-6,
    skip_gate: bool = False,
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    **hints: Any,
) -> Operand:
    """Emits the same NAMEs with `attn_out` added to the result (`"epilogue"`).

    The leaf adds it: no add stands in the program. Without both residuals this is
    `mlp_kernel`.

    Args:
        hidden: as in `mlp_kernel`.
        gate_w: as in `mlp_kernel`.
        up_w: as in `mlp_kernel`.
        down_w: as in `mlp_kernel`.
        mlp_out: the destination. Its shape and dtype are the result's; its values are
            never read, so that its gradient is zero.
        attn_out: the residual, of the shape of `hidden`.
        gamma: as in `mlp_kernel`.
        beta: as in `mlp_kernel`.
        gate_b: as in `mlp_kernel`.
        up_b: as in `mlp_kernel`.
        down_b: as in `mlp_kernel`.
        activation: as in `mlp_kernel`.
        norm: as in `mlp_kernel`.
        eps: as in `mlp_kernel`.
        skip_gate: as in `mlp_kernel`.
        gate_clamp_upper_limit: as in `mlp_kernel`.
        gate_clamp_lower_limit: as in `mlp_kernel`.
        up_clamp_upper_limit: as in `mlp_kernel`.
        up_clamp_lower_limit: as in `mlp_kernel`.
        **hints: as in `mlp_kernel`.

    Returns:
        An array or tile of the shape and dtype of `mlp_out`.
    """
    call = SimpleNamespace(**locals(), out_dtype=getattr(mlp_out, "dtype", None))
    form = "none" if attn_out is None else "epilogue"
    outs = _emit("mlp_fused_add_kernel", call, form, residual=attn_out)
    return outs[0]


@contracts.contracted()
def quant_mlp_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    gate_up_w_scale: Operand | None = None,
    down_w_scale: Operand | None = None,
    **options: Any,
) -> Operand:
    """Refuses: `MLP` on quantized weights is not built yet.

    Args:
        hidden: as in `mlp_kernel`.
        gate_w: as in `mlp_kernel`, quantized.
        up_w: as in `mlp_kernel`, quantized.
        down_w: as in `mlp_kernel`, quantized.
        gate_up_w_scale: the scales of `gate_w` and `up_w`.
        down_w_scale: the scales of `down_w`.
        **options: the options of `mlp_kernel`.

    Returns:
        Nothing.
    """
    raise _unquantized("quant_mlp_kernel")


@contracts.contracted()
def quant_mlp_fused_add_kernel(
    hidden: Operand,
    gate_w: Operand | None,
    up_w: Operand,
    down_w: Operand,
    mlp_out: Operand | None = None,
    attn_out: Operand | None = None,
    gate_up_w_scale: Operand | None = None,
    down_w_scale: Operand | None = None,
    **options: Any,
) -> Operand:
    """Refuses: `MLP` on quantized weights is not built yet.

    Args:
        hidden: as in `mlp_kernel`.
        gate_w: as in `mlp_kernel`, quantized.
        up_w: as in `mlp_kernel`, quantized.
        down_w: as in `mlp_kernel`, quantized.
        mlp_out: as in `mlp_fused_add_kernel`.
        attn_out: as in `mlp_fused_add_kernel`.
        gate_up_w_scale: the scales of `gate_w` and `up_w`.
        down_w_scale: the scales of `down_w`.
        **options: the options of `mlp_kernel`.

    Returns:
        Nothing.
    """
    raise _unquantized("quant_mlp_fused_add_kernel")


def _unquantized(emitter: str) -> NotImplementedError:
    return NotImplementedError(
        f"{emitter}: quantized weights (gate_up_w_scale, down_w_scale) are not built "
        f"yet; mlp_kernel and mlp_fused_add_kernel take unquantized operands"
    )


def _emit(emitter: str, call: SimpleNamespace, fused_add: str, **added: Any) -> tuple:
    """Picks the NAME and binds the macro; tiles come back as tiles."""
    gate_w = None if call.skip_gate else call.gate_w
    vectors = call.gamma, call.beta, call.gate_b, call.up_b, call.down_b
    ops = dense.Operands(call.hidden, gate_w, call.up_w, call.down_w, *vectors, **added)
    ios = (*ops, getattr(call, "mlp_out", None))
    is_tiled = is_all_io_type_memref_tile(ios, emitter)
    limits = {key: getattr(call, key) for key in LIMITS}
    config = dict(
        activation=member(ActFnType, call.activation).name,
        norm=norm_word(call.norm),
        eps=float(call.eps),
        skip_gate=bool(call.skip_gate),
        fused_add=fused_add,
        store_fused_add=bool(getattr(call, "store_fused_add", False)),
        out_dtype=None if call.out_dtype is None else jnp.dtype(call.out_dtype).name,
        is_tiled=is_tiled,
        **{key: None if v is None else float(v) for key, v in limits.items()},
        **call.hints,
    )
    results = 2 if config["store_fused_add"] else 1
    if not is_tiled:
        return mlp_family(*ops, name=UNTILED, **config)[:results]
    tiles = ops._asdict()
    require_partitions(emitter, **tiles)
    data = [getattr(tile, "data", None) for tile in ops]
    outs = mlp_family(*data, name=TILED, **config)[:results]
    outs = tuple(MemrefTile(out, call.hidden.axis) for out in outs)
    require_fit(emitter, **tiles, **dict(zip(("out", "added"), outs, strict=False)))
    return outs


def _leaf(*operands, name, is_tiled, **config):
    leaf = dense.mlp_tiled_fwd if is_tiled else dense.mlp_fwd
    return leaf(*operands, name=name, **config)


def _backward_leaf(*operands, name, is_tiled, given, **config):
    leaf = dense.mlp_tiled_bwd if is_tiled else dense.mlp_bwd
    return leaf(*operands, name=name, **config)


def _outputs(*, skip_gate, store_fused_add, **_):
    """The names of the outputs that a config gives."""
    added = ("added",) if store_fused_add else ()
    return ("out", *added, *(() if skip_gate else ("gate",)), "up")


def _gradients(*, given, **_):
    return tuple(f"d_{operand}" for operand in given)


def _given(operands) -> tuple[str, ...]:
    pairs = zip(dense.Operands._fields, operands, strict=True)
    return tuple(key for key, operand in pairs if operand is not None)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    given = _given(operands)
    grads = mlp_backward(
        *operands, *outs, *cotangents, name=BACKWARD, given=given, **config
    )
    found = dict(zip(given, grads, strict=True))
    return tuple(found.get(key) for key in dense.Operands._fields)


_SHAPES = dict(gate_w=(8, 6), up_w=(8, 6), down_w=(6, 8), gamma=(1, 8), beta=(1, 8))
_SHAPES |= dict(gate_b=(1, 6), up_b=(1, 6), down_b=(1, 8))
_TILE = {8: (4, 2), 6: (3, 2)}


def _example(name: str, dtype: Any, batch: int) -> Example:
    """RMSNorm and a stored prologue, or for tiles LayerNorm and a residual."""
    is_tiled = name == TILED
    rows = dict.fromkeys(
        ("hidden", "residual" if is_tiled else "addend"), (batch, 3, 8)
    )
    shapes = {k: v for k, v in _SHAPES.items() if k != "beta" or is_tiled} | rows
    keys = iter(jax.random.split(jax.random.key(7), 32))
    made = {k: jax.random.normal(next(keys), v, dtype) for k, v in shapes.items()}
    made = {k: x if k in rows else x / 2 for k, x in made.items()}
    if is_tiled:
        made = {k: _tile(x, TILE_AXES[k]) for k, x in made.items()}
    operands = tuple(made.get(key) for key in dense.Operands._fields)
    config = dict(
        activation="GELU" if is_tiled else "SiLU",
        norm="layer" if is_tiled else "rms",
        eps=1e-3,
        skip_gate=False,
        fused_add="epilogue" if is_tiled else "prologue",
        store_fused_add=not is_tiled,
        is_tiled=is_tiled,
    )
    axis = 2 if is_tiled else 0
    split = tuple(axis if key in rows else None for key in _given(operands))
    outs = len(_outputs(**config)) * (axis,)
    if name != BACKWARD:
        return Example(operands, config, split, outs)
    stored = plain.mlp_plain(*operands, name=UNTILED, **config)
    cotangents = [jax.random.normal(next(keys), x.shape, x.dtype) for x in stored]
    config = dict(config, given=_given(operands))
    return Example((*operands, *stored, *cotangents), config, split + 2 * outs, split)


def _tile(x: jax.Array, axis: int) -> jax.Array:
    x = jnp.moveaxis(x, axis, 0)
    return x.reshape(*_TILE[x.shape[0]], *x.shape[1:])


mlp_backward = MacroFamily(
    "mlp_bwd",
    (BACKWARD,),
    _backward_leaf,
    plain=plain.mlp_plain_bwd,
    outputs=_gradients,
    example=_example,
)
mlp_family = MacroFamily(
    "mlp",
    (UNTILED, TILED),
    _leaf,
    plain=plain.mlp_plain,
    outputs=_outputs,
    backward=_emit_backward,
    example=_example,
)
