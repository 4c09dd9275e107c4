"""How a call becomes the macro `ExpertMLPs`: its operands and config; the emitter."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from neuronjax.kernels.expert_mlps.operands import OUT_AXIS, Operands
from neuronjax.primitives import contracts
from neuronjax.primitives.expert_mlps import (  # noqa: F401  enter the rows
    chip_rules,
    quantized_rules,
    rules,
)
from neuronjax.primitives.expert_mlps.facts import (
    EMITTER,
    LIMITS,
    facts,
    given,
    kind_of,
    scaling_of,
)
from neuronjax.primitives.expert_mlps.macro import NAME, expert_mlps
from neuronjax.primitives.known import in_int32
from neuronjax.primitives.mx.formats import weight_format as format_of
from neuronjax.primitives.options import ActFnType, ExpertAffinityScaleMode, member
from neuronjax.primitives.tile import MemrefTile, require_fit, require_partitions

Operand = Shaped[Array, "..."] | MemrefTile
# Beyond every expert and rank, and far from the end of int32.
_BEYOND = 1 << 20


def emit(call: SimpleNamespace) -> Any:
    """Binds `ExpertMLPs` for a call that keeps the rules; an array or a tile."""
    config, operands = config_of(call), _operands(call)
    if not config["is_tiled"]:
        return expert_mlps(*operands, name=NAME, **config)[0]
    tiles = {
        key: x for key, x in operands._asdict().items() if isinstance(x, MemrefTile)
    }
    require_partitions(EMITTER, **tiles)
    data = (x.data if isinstance(x, MemrefTile) else x for x in operands)
    out = MemrefTile(expert_mlps(*data, name=NAME, **config)[0], OUT_AXIS)
    require_fit(EMITTER, **tiles, out=out)
    return out


def _operands(call: SimpleNamespace) -> Operands:
    """The operands that the call uses: what an option leaves out is not read."""
    own = given(call)
    found = {key: getattr(own, key) for key in Operands._fields}
    scaled = scaling_of(call) is ExpertAffinityScaleMode.POST_SCALE
    if not scaled:
        found["affinities"] = None
    if own.all_experts and not own.mask:
        found["index"] = None
    if own.all_experts and not scaled:
        found["rank"] = None
    for key in ("index", "rank"):
        if found[key] is not None:
            found[key] = _as_int32(found[key])
    if isinstance(found["rank"], MemrefTile) and not _is_tiled(own):
        found["rank"] = found["rank"].to_tensor()
    if _is_tiled(own) and found["rank"] is not None:
        rank = found["rank"]
        is_tile = isinstance(rank, MemrefTile)
        found["rank"] = rank if is_tile else MemrefTile.from_tensor(rank, 0)
    return Operands(**found)


def _is_tiled(own: SimpleNamespace) -> bool:
    return isinstance(own.hidden, MemrefTile)


def _as_int32(x: Any) -> Any:
    """`x` in int32; what is far outside of the experts stays outside."""
    if isinstance(x, MemrefTile):
        return MemrefTile(_as_int32(x.data), x.axis, x.buffer)
    if isinstance(x, int | np.integer):
        return jnp.full((1, 1), min(max(int(x), -1), _BEYOND), jnp.int32)
    return in_int32(x, -1, _BEYOND)


def config_of(call: SimpleNamespace) -> dict[str, Any]:
    """The macro's config bag of a call that keeps the rules."""
    own = given(call)
    kind = kind_of({"gate_up_w": own.gate_up_w})
    limits = {key: getattr(own, key) for key in LIMITS}
    out_dtype = None if own.out_dtype is None else jnp.dtype(own.out_dtype).name
    config = dict(
        all_experts=bool(own.all_experts),
        scaling=scaling_of(call).name,
        mask=bool(own.all_experts and own.mask),
        activation=member(ActFnType, own.activation).name,
        block_size=int(own.block_size) if own.dynamic else None,
        out_dtype=out_dtype,
        quantization=kind,
        is_fp8_kernel=kind == "ROW",
        is_tiled=_is_tiled(own),
        **{key: None if x is None else float(x) for key, x in limits.items()},
        **getattr(call, "hints", {}),
    )
    if kind == "MX":
        fmt = format_of(own.gate_up_w, own.weight_dtype)
        assert fmt is not None
        config |= dict(weight_format=fmt.name, is_fp8_kernel=fmt.bits == 8)
    return config


@contracts.contracted(facts)
def expert_mlps_kernel(
    hidden: Operand,
    gate_up_w: Operand,
    down_w: Operand,
    affinities: Operand | None = None,
    index: Operand | None = None,
    rank: Operand | int | None = None,
    gate_up_b: Operand | None = None,
    down_b: Operand | None = None,
    gate_up_scale: Operand | None = None,
    down_scale: Operand | None = None,
    hidden_scale: Array | None = None,
    *,
    all_experts: bool = False,
    mask: bool = False,
    scaling: ExpertAffinityScaleMode | str = "NO_SCALE",
    activation: ActFnType | str = "SiLU",
    gate_clamp_upper_limit: float | None = None,
    gate_clamp_lower_limit: float | None = None,
    up_clamp_upper_limit: float | None = None,
    up_clamp_lower_limit: float | None = None,
    dynamic: bool = False,
    block_size: int | None = None,
    out_dtype: DTypeLike | None = None,
    weight_dtype: Any = None,
    **hints: Any,
) -> jax.Array | MemrefTile:
    """Emits `ExpertMLPs`, on tensors or on tiles (`is_tiled`).

    A tile lies on `H` (`hidden`, `gate_up_w`, `down_b`, `down_scale`), on `I`
    (`down_w`, `gate_up_b`, `gate_up_scale`) or on `T` (`affinities`, `index`).

    Args:
        hidden: `[T, H]`.
        gate_up_w: `[E_L, H, 2, I]`: 0 is the gate, 1 up.
        down_w: `[E_L, I, H]`.
        affinities: `[T, E]`.
        index: `[T, K]` integers.
        rank: `[1, 1]`, or a number.
        gate_up_b: `[E_L, 2, I]`.
        down_b: `[E_L, H]`.
        gate_up_scale: `[E_L, 2, I]`.
        down_scale: `[E_L, H]`.
        hidden_scale: as `hidden_input_scale` of `moe_tkg`.
        all_experts: as `is_all_expert` of `moe_tkg`.
        mask: as `mask_unselected_experts` of `moe_tkg`.
        scaling: `NO_SCALE` or `POST_SCALE`.
        activation: `SiLU`, `GELU`, `GELU_Tanh_Approx` or `Swish`.
        gate_clamp_upper_limit: as in `moe_tkg`.
        gate_clamp_lower_limit: as in `moe_tkg`.
        up_clamp_upper_limit: as in `moe_tkg`.
        up_clamp_lower_limit: as in `moe_tkg`.
        dynamic: as `is_all_expert_dynamic` of `moe_tkg`.
        block_size: as in `moe_tkg`.
        out_dtype: dtype of the result; None for that of `hidden`.
        weight_dtype: as in `moe_tkg`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `[T, H]`; for tiles a tile of it, on `H`.
    """
    return emit(SimpleNamespace(**locals(), function=EMITTER))
