"""What the rules of the block read: its own sizes, and what its parts would refuse."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import accumulator, promoted
from neuronjax.primitives.contracts import can
from neuronjax.primitives.options import (
    FLOATS,
    ExpertAffinityScaleMode,
    member,
    odd_dtype,
)

FUNCTION = "moe_block_tkg"
ROUTER = ("router_weights", "router_bias")
EXPERTS = (
    "expert_gate_up_weights",
    "expert_down_weights",
    "expert_gate_up_weights_scale",
    "expert_down_weights_scale",
    "expert_gate_up_bias",
    "expert_down_bias",
    "expert_affinities_scaling_mode",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
    "is_all_expert",
    "rank_id",
    "weight_dtype",
)
SHARED = ("shared_expert_gate_w", "shared_expert_up_w", "shared_expert_down_w")
SHARED_BIASES = tuple(f"shared_expert_{side}_bias" for side in ("gate", "up", "down"))
FLAGS = ("router_pre_norm", "norm_topk_prob", "skip_router_logits", "is_all_expert")
# A block quantizes its hidden states itself: its own rule says what the chip takes.
_NOT_OURS = ("expert_mlps.chip_mx_tokens",)


def has_shared_expert(call: SimpleNamespace) -> bool:
    """Whether there is a shared expert."""
    return call.shared_expert_down_w is not None


def router_dtype(call: SimpleNamespace) -> jnp.dtype:
    """The dtype of the router's factors."""
    if call.router_mm_dtype is not None:
        return jnp.dtype(call.router_mm_dtype)
    return promoted(call.inp.dtype, call.router_weights.dtype)


def router_of(call: SimpleNamespace) -> dict[str, Any]:
    """The settings of the router."""
    return dict(
        act_fn=call.router_act_fn,
        k=call.top_k,
        x_hbm_layout=1,
        router_pre_norm=bool(call.router_pre_norm),
        norm_topk_prob=bool(call.norm_topk_prob),
    )


def experts_of(call: SimpleNamespace) -> dict[str, Any]:
    """The operands and settings of the experts beside what the router gives."""
    scaling = member(ExpertAffinityScaleMode, call.expert_affinities_scaling_mode)
    is_scaled = scaling is ExpertAffinityScaleMode.POST_SCALE
    dense = bool(call.router_pre_norm) and not call.norm_topk_prob
    found = {name: getattr(call, name) for name in EXPERTS}
    return found | dict(
        activation_fn=call.hidden_act_fn,
        mask_unselected_experts=dense and bool(call.is_all_expert) and is_scaled,
    )


def norm_of(call: SimpleNamespace) -> dict[str, Any]:
    """The settings of the norm."""
    return dict(norm="rms", eps=call.eps, hidden_actual=call.hidden_actual)


def shared_of(call: SimpleNamespace) -> dict[str, Any]:
    """The weights and settings of the shared expert."""
    limits = {name: getattr(call, name) for name in EXPERTS if "clamp" in name}
    return limits | dict(
        gate_w=call.shared_expert_gate_w,
        up_w=call.shared_expert_up_w,
        down_w=call.shared_expert_down_w,
        gate_b=call.shared_expert_gate_bias,
        up_b=call.shared_expert_up_bias,
        down_b=call.shared_expert_down_bias,
        activation=call.hidden_act_fn,
    )


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rows read."""
    inp, router = _shape(call.inp), _shape(call.router_weights)
    ranked = len(inp) == 3 and len(router) == 2 and 0 not in (*inp, *router)
    width = inp[-1] if ranked else 0
    own = ("inp", "gamma", "residual", *ROUTER, *SHARED, *SHARED_BIASES)
    odd = odd_dtype({name: getattr(call, name) for name in own})
    found: dict[str, Any] = dict(
        inp_shape=inp,
        router_shape=router,
        ranked=ranked,
        H=width,
        T=inp[0] * inp[1] if ranked else 0,
        odd=odd,
        is_dtype=_is_dtype(call.router_mm_dtype),
        unlike="; ".join(_unlike(call, inp)) if ranked else "",
        packed=str(getattr(call.expert_gate_up_weights, "dtype", "")).startswith(
            "uint"
        ),
    )
    if ranked and not odd and found["is_dtype"]:
        return found | _of_parts(call, found["T"], width, router[1])
    none = ("norm", "router", "experts", "shared", "chip_router", "chip_experts")
    return found | dict.fromkeys(none, "")


def _of_parts(call: SimpleNamespace, tokens: int, width: int, experts: int) -> dict:
    """What the parts would refuse of the calls that the block makes."""
    dtype = router_dtype(call)
    rows = jax.ShapeDtypeStruct((tokens, width), call.inp.dtype)
    gain = jax.ShapeDtypeStruct((width,), call.gamma.dtype)
    norm = can("neuron_reduce_macro_kernel", rows, gain, **norm_of(call))
    routed = jax.ShapeDtypeStruct((tokens, width), dtype)
    weights = jax.ShapeDtypeStruct(_shape(call.router_weights), dtype)
    report = can("router_topk", routed, weights, call.router_bias, **router_of(call))
    math, chip = _messages(report)
    k = call.top_k if isinstance(call.top_k, int) else 1
    inner = can(
        "moe_tkg",
        rows,
        expert_affinities=jax.ShapeDtypeStruct((tokens, experts), jnp.float32),
        expert_index=jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        **experts_of(call),
    )
    of_experts, chip_of_experts = _messages(inner)
    return dict(
        norm=_messages(norm)[0],
        router=math,
        experts=of_experts,
        shared=_of_shared(call, rows) if has_shared_expert(call) else "",
        chip_router=chip,
        chip_experts=chip_of_experts,
    )


def _of_shared(call: SimpleNamespace, rows: jax.ShapeDtypeStruct) -> str:
    """What the shared expert refuses."""
    wide = jax.ShapeDtypeStruct(rows.shape, accumulator(rows.dtype))
    given = dict(mlp_out=rows, attn_out=wide, **shared_of(call))
    return _messages(can("mlp_fused_add_kernel", rows, **given))[0]


def _messages(report: Any) -> tuple[str, str]:
    """What is refused always, and what by the chip alone."""
    found: dict[str, list[str]] = dict(math=[], hw=[])
    for violation in report.violations:
        if violation.id not in _NOT_OURS:
            own = violation.message.removeprefix(f"{report.function}: ")
            found[violation.tag].append(own)
    return "; ".join(found["math"]), "; ".join(found["hw"])


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", None) or ())


def _is_dtype(dtype: Any) -> bool:
    try:
        return dtype is None or jnp.dtype(dtype) in FLOATS
    except TypeError:
        return False


def _unlike(call: SimpleNamespace, inp: tuple[int, ...]):
    """Every operand of the norm and the shared expert of another shape."""
    width, shared = inp[-1], _shape(call.shared_expert_down_w)
    inner = shared[0] if len(shared) == 2 else 0
    wanted = dict(
        gamma=("[1, H]", (1, width)),
        residual=("that of inp", inp),
        router_weights=("[H, E]", (width, _shape(call.router_weights)[1])),
        shared_expert_gate_w=("[H, I_s]", (width, inner)),
        shared_expert_up_w=("[H, I_s]", (width, inner)),
        shared_expert_down_w=("[I_s, H]", (inner, width)),
        shared_expert_gate_bias=("[1, I_s]", (1, inner)),
        shared_expert_up_bias=("[1, I_s]", (1, inner)),
        shared_expert_down_bias=("[1, H]", (1, width)),
    )
    for name, (words, shape) in wanted.items():
        x = getattr(call, name)
        if x is not None and _shape(x) != shape:
            yield f"{name} must have shape {words} = {shape}, got {_shape(x)}"
