"""The macros `AttentionBlockTkg` and `AttentionBlockTkgBwd`.

Residuals carry the checkpoint names `attention_block_tkg_x_out`, `_k_out`, `_v_out`,
and, where the stage is there, `_rstd`, `_q_pre_rstd`, `_k_pre_rstd`, `_q_post_rstd`,
`_k_post_rstd`, `_attention`, `_neg_max` and `_recip`.

Quantized weights, all scales, fp8 caches and integers are constants.
"""

import operator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.kernels.attention_block_tkg.block import (
    attention_block_bwd,
    attention_block_fwd,
)
from neuronjax.kernels.attention_block_tkg.operands import Operands, output_names
from neuronjax.kernels.attention_block_tkg.plain import attention_block_plain
from neuronjax.kernels.attention_block_tkg.plain_backward import (
    attention_block_bwd_plain,
)
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.quantization.fp8 import is_fp8
from neuronjax.primitives.attention_block_tkg import (
    chip_rules,  # noqa: F401  enters the rows
    quantized_rules,  # noqa: F401  enters the rows
    rules,  # noqa: F401  enters the rows
)
from neuronjax.primitives.attention_block_tkg.example import BACKWARD, NAME, example
from neuronjax.primitives.attention_block_tkg.facts import OPERANDS, facts
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.known import require_divisors
from neuronjax.primitives.macro import MacroFamily
from neuronjax.primitives.options import QuantizationType, member
from neuronjax.primitives.output_projection.rules import core_count

# The norms' epsilon where none is named: the vendor's reference; its kernel takes 1e-3.
EPS = 1e-6
_CONSTANTS = ("qkv_scale", "qkv_in_scale", "k_scale", "v_scale")
_CONSTANTS += ("out_scale", "out_in_scale")


@contracted(facts)
def attention_block_tkg_kernel(
    X: Float[Array, "batch seq d_model"],
    W_qkv: Array,
    K_cache: Array,
    V_cache: Array,
    attention_mask: Array | None = None,
    *,
    X_hidden_dim_actual: int | None = None,
    rmsnorm_X_enabled: bool = False,
    rmsnorm_X_eps: float | None = None,
    rmsnorm_X_gamma: Array | None = None,
    bias_qkv: Array | None = None,
    quantization_type_qkv: QuantizationType | str = "NONE",
    weight_dequant_scale_qkv: Array | None = None,
    input_dequant_scale_qkv: Array | None = None,
    rmsnorm_QK_pre_rope_enabled: bool = False,
    rmsnorm_QK_pre_rope_eps: float | None = None,
    rmsnorm_QK_pre_rope_W_Q: Array | None = None,
    rmsnorm_QK_pre_rope_W_K: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    rope_contiguous_layout: bool = True,
    rmsnorm_QK_post_rope_enabled: bool = False,
    rmsnorm_QK_post_rope_eps: float | None = None,
    rmsnorm_QK_post_rope_W_Q: Array | None = None,
    rmsnorm_QK_post_rope_W_K: Array | None = None,
    K_cache_transposed: bool = False,
    active_blocks_table: Array | None = None,
    sink: Array | None = None,
    update_cache: bool = True,
    kv_cache_update_idx: Array | None = None,
    W_out: Array | None = None,
    bias_out: Array | None = None,
    quantization_type_out: QuantizationType | str = "NONE",
    weight_dequant_scale_out: Array | None = None,
    input_dequant_scale_out: Array | None = None,
    transposed_out: bool = False,
    out_in_sb: bool = False,
    softmax_scale: float | Array | None = None,
    enable_fa_s_prior_tiling: bool = True,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    skip_attention: bool = False,
    KVDP: int = 1,
    KVDP_replica_group: str | None = None,
    round_activations: bool = True,
    lnc: int | None = None,
    lnc_axis: str | None = None,
    num_stages: int | None = None,
    num_tiles: int | None = None,
) -> tuple[Array, Array, Array]:
    """Emits `AttentionBlockTkg`.

    Args:
        X: as in `attention_block_tkg`, and so are all but the last three.
        W_qkv: as in `attention_block_tkg`.
        K_cache: as in `attention_block_tkg`.
        V_cache: as in `attention_block_tkg`.
        attention_mask: as in `attention_block_tkg`.
        X_hidden_dim_actual: as in `attention_block_tkg`.
        rmsnorm_X_enabled: as in `attention_block_tkg`.
        rmsnorm_X_eps: as in `attention_block_tkg`.
        rmsnorm_X_gamma: as in `attention_block_tkg`.
        bias_qkv: as in `attention_block_tkg`.
        quantization_type_qkv: as in `attention_block_tkg`.
        weight_dequant_scale_qkv: as in `attention_block_tkg`.
        input_dequant_scale_qkv: as in `attention_block_tkg`.
        rmsnorm_QK_pre_rope_enabled: as in `attention_block_tkg`.
        rmsnorm_QK_pre_rope_eps: as in `attention_block_tkg`.
        rmsnorm_QK_pre_rope_W_Q: as in `attention_block_tkg`.
        rmsnorm_QK_pre_rope_W_K: as in `attention_block_tkg`.
        cos: as in `attention_block_tkg`.
        sin: as in `attention_block_tkg`.
        rope_contiguous_layout: as in `attention_block_tkg`.
        rmsnorm_QK_post_rope_enabled: as in `attention_block_tkg`.
        rmsnorm_QK_post_rope_eps: as in `attention_block_tkg`.
        rmsnorm_QK_post_rope_W_Q: as in `attention_block_tkg`.
        rmsnorm_QK_post_rope_W_K: as in `attention_block_tkg`.
        K_cache_transposed: as in `attention_block_tkg`.
        active_blocks_table: as in `attention_block_tkg`.
        sink: as in `attention_block_tkg`.
        update_cache: as in `attention_block_tkg`.
        kv_cache_update_idx: as in `attention_block_tkg`.
        W_out: as in `attention_block_tkg`, or any columns of it: `X_out` has those.
        bias_out: as in `attention_block_tkg`.
        quantization_type_out: as in `attention_block_tkg`.
        weight_dequant_scale_out: as in `attention_block_tkg`.
        input_dequant_scale_out: as in `attention_block_tkg`.
        transposed_out: as in `attention_block_tkg`.
        out_in_sb: as in `attention_block_tkg`.
        softmax_scale: as in `attention_block_tkg`.
        enable_fa_s_prior_tiling: as in `attention_block_tkg`.
        k_scale: as in `attention_block_tkg`.
        v_scale: as in `attention_block_tkg`.
        skip_attention: as in `attention_block_tkg`.
        KVDP: as in `attention_block_tkg`.
        KVDP_replica_group: as in `attention_block_tkg`.
        round_activations: as in `attention_block_tkg`.
        lnc: as in `attention_block_tkg`.
        lnc_axis: a mesh axis whose cores hold columns of `W_out` of their own, and all
            other operands alike. `X_out` then has a core's own columns; everything else
            comes back alike, and so do the gradients, summed over the cores.
        num_stages: a scheduling hint; it travels in the config bag and changes no
            value; so does `num_tiles`.
        num_tiles: see `num_stages`.

    Returns:
        `(X_out, K_out, V_out)` as in `attention_block_tkg`.
    """
    call = SimpleNamespace(**locals())
    require_values("attention_block_tkg_kernel", call)
    operands, config = _operands(call), _config(call) | _hints(call)
    x_out, k_out, v_out, *_ = attention_block(*operands, name=NAME, **config)
    return x_out, k_out, v_out


def require_values(function: str, call: SimpleNamespace) -> None:
    """Refuses scales that divide and are not positive, where they are known."""
    names = ("input_dequant_scale_qkv", "input_dequant_scale_out")
    require_divisors(function, **{name: getattr(call, name) for name in names})


def _operands(call: SimpleNamespace) -> Operands:
    """The operands that the call uses: a stage that is left out reads none."""
    given = {ours: getattr(call, theirs) for theirs, ours in OPERANDS.items()}
    if call.attention_mask is not None:
        given["mask"] = jnp.asarray(call.attention_mask).astype(bool)
    if call.skip_attention:
        given |= dict.fromkeys(("mask", "sink"))
    if call.cos is None or call.sin is None:
        given |= dict.fromkeys(("cos", "sin"))
    if not call.update_cache:
        given["position"] = None
    array = _is_array(call.softmax_scale) and not call.skip_attention
    return Operands(**given, softmax_scale=call.softmax_scale if array else None)


def _config(call: SimpleNamespace) -> dict[str, Any]:
    kinds = [
        member(QuantizationType, getattr(call, f"quantization_type_{side}")).name
        for side in ("qkv", "out")
    ]
    actual = call.X_hidden_dim_actual
    return dict(
        x_eps=_epsilon(call, "X"),
        hidden_actual=None if actual is None else operator.index(actual),
        pre_eps=_epsilon(call, "QK_pre_rope"),
        post_eps=_epsilon(call, "QK_post_rope"),
        interleaved=not call.rope_contiguous_layout,
        softmax_scale=_scale(call),
        k_transposed=bool(call.K_cache_transposed),
        update_cache=bool(call.update_cache),
        skip_attention=bool(call.skip_attention),
        quantization=kinds[0],
        is_fp8_kernel=is_fp8(call.W_qkv.dtype),
        quantization_out=kinds[1] if call.W_out is not None else "NONE",
        transposed_out=bool(call.transposed_out),
        cores=_cores(call),
        out_in_sb=bool(call.out_in_sb),
        round_activations=bool(call.round_activations),
        kvdp=operator.index(call.KVDP),
        axis=call.KVDP_replica_group if operator.index(call.KVDP) > 1 else None,
        lnc_axis=call.lnc_axis,
    )


def _hints(call: SimpleNamespace) -> dict[str, Any]:
    given = dict(num_stages=call.num_stages, num_tiles=call.num_tiles)
    given = {name: value for name, value in given.items() if value is not None}
    return dict(given, enable_fa_s_prior_tiling=call.enable_fa_s_prior_tiling)


def _epsilon(call: SimpleNamespace, side: str) -> float | None:
    """The epsilon of a norm; `None` for a norm that is left out."""
    if not getattr(call, f"rmsnorm_{side}_enabled"):
        return None
    eps = getattr(call, f"rmsnorm_{side}_eps")
    return EPS if eps is None else float(eps)


def _is_array(scale: Any) -> bool:
    return hasattr(scale, "dtype") and hasattr(scale, "shape")


def _scale(call: SimpleNamespace) -> float | None:
    """The softmax scale where it is a number; 0 is 0."""
    if _is_array(call.softmax_scale):
        return None
    if call.softmax_scale is None:
        return float(call.V_cache.shape[-1]) ** -0.5
    return float(call.softmax_scale)


def _cores(call: SimpleNamespace) -> int | None:
    if not call.transposed_out:
        return None
    return core_count(call.lnc, call.W_out.shape[1])


def _emit_backward(operands, outs, cotangents, *, name, **config):
    o = Operands(*operands)
    live = live_operands(o, config)
    args = (*operands, *outs, *cotangents)
    grads = attention_block_backward(*args, name=BACKWARD, live=live, **config)
    found = dict(zip(live, grads, strict=True))
    return tuple(
        found[key] if key in found else _no_gradient(x)
        for key, x in zip(Operands._fields, operands, strict=True)
    )


def live_operands(o: Operands, config: dict[str, Any]) -> tuple[str, ...]:
    """The operands that have a derivative."""
    constants = set(_CONSTANTS)
    constants |= {"w_qkv"} if config["quantization"] != "NONE" else set()
    constants |= {"w_out"} if config["quantization_out"] != "NONE" else set()
    return tuple(
        key
        for key, x in o._asdict().items()
        if x is not None and key not in constants and is_differentiable(x.dtype)
    )


def _no_gradient(x: Any) -> Any:
    """Zeros for a constant; nothing for what is absent, integer or fp8."""
    if x is None or not is_differentiable(x.dtype):
        return None
    return jnp.zeros_like(x)


def _static_leaf(*operands, **config):
    return attention_block_fwd(*operands, **config, static=True)


def _static_backward(*operands, **config):
    return attention_block_bwd(*operands, **config, static=True)


attention_block_backward = MacroFamily(
    "attention_block_tkg_bwd",
    (BACKWARD,),
    attention_block_bwd,
    plain=attention_block_bwd_plain,
    outputs=lambda *, live, **_: tuple(f"d_{key}" for key in live),
    static=_static_backward,
    axis="lnc_axis",
    example=example,
)
attention_block = MacroFamily(
    "attention_block_tkg",
    (NAME,),
    attention_block_fwd,
    plain=attention_block_plain,
    outputs=output_names,
    backward=_emit_backward,
    static=_static_leaf,
    axis="lnc_axis",
    example=example,
)
