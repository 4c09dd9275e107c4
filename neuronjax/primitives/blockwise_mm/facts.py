"""What the rules of blockwise expert calls read, by the operands' roles.

`ARGUMENTS` translates the names that each function gives its operands, so that each
rule is written once.
"""

from types import SimpleNamespace
from typing import Any

from neuronjax.kernels.mx import layout
from neuronjax.primitives.blockwise_mm.spec import (
    BLOCK_SCALED,
    DROPPING,
    QuantizationConfig,
    ShardOnIConfig,
    SkipMode,
    quantization_of,
    spec_of,
)
from neuronjax.primitives.kinds import is_number
from neuronjax.primitives.mx.formats import weight_format
from neuronjax.primitives.options import (
    ActFnType,
    AffinityOption,
    ExpertAffinityScaleMode,
    KernelTypeOption,
    QuantizationType,
    member,
)

CTE, HIDDEN_SHARD = "moe_cte", "blockwise_mm_baseline_shard_hidden"
BWD, KERNEL = "blockwise_mm_bwd", "blockwise_mm_kernel"
KERNEL_BWD = "blockwise_mm_bwd_kernel"
FORWARD = (CTE, HIDDEN_SHARD)
EMITTERS = (KERNEL, KERNEL_BWD)
ALL = (*FORWARD, *EMITTERS, BWD)
_SHARED = dict(
    hidden="hidden_states",
    affinity="expert_affinities_masked",
    gate_up_w="gate_up_proj_weight",
    down_w="down_proj_weight",
    token_id="token_position_to_id",
    block_expert="block_to_expert",
)
_BUFFERS = dict(gate_up="gate_up_activations_T", down="down_activations")
_OPTIONS = dict(
    gate_up_b="gate_and_up_proj_bias",
    down_b="down_proj_bias",
    gate_up_scale="gate_up_proj_scale",
    down_scale="down_proj_scale",
    conditions="conditions",
)
_CHECKPOINTS = dict(
    gate_up="gate_up_proj_act_checkpoint_T",
    down="down_proj_act_checkpoint",
    d_out="output_hidden_states_grad",
)
_STORED = ("gate_up", "down", "d_out", "d_gate_up", "d_down")
ROLES = (*_SHARED, *_OPTIONS, *_STORED)
ARGUMENTS = {
    CTE: _SHARED | _OPTIONS | _BUFFERS,
    HIDDEN_SHARD: _SHARED | _BUFFERS,
    KERNEL: {role: role for role in (*_SHARED, *_OPTIONS)},
    KERNEL_BWD: {role: role for role in ROLES},
    BWD: _SHARED | _CHECKPOINTS,
}
INTEGERS = ("token_id", "block_expert", "conditions")
LIMITS = (
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
)


def operands_of(call: SimpleNamespace) -> dict[str, Any]:
    """The operands by role; None for what the function does not take."""
    names = ARGUMENTS[call.function]
    found = {role: getattr(call, names.get(role, ""), None) for role in ROLES}
    if call.function == CTE:
        scales = quantization_of(call.quantization_config) or QuantizationConfig()
        found["gate_up_scale"] = scales.gate_up_proj_scale
        found["down_scale"] = scales.down_proj_scale
    return found


def optional(call: SimpleNamespace) -> tuple[str, ...]:
    """The roles that may be absent."""
    absent = ["block_expert"] if is_dropping(call) else []
    if call.function != BWD:
        absent += ["gate_up", "down", "d_gate_up", "d_down"]
    if call.function not in (BWD, KERNEL_BWD):
        absent.append("d_out")
    if multiplies_on_intermediate(call):
        absent.append("down")
    return (*_OPTIONS, *absent)


def implementation(call: SimpleNamespace) -> Any:
    """The `MoECTEImplementation` of a call of `moe_cte`; None for other functions."""
    spec = spec_of(call.spec) if call.function == CTE else None
    return None if spec is None else spec.implementation


def on_intermediate_of(call: SimpleNamespace) -> ShardOnIConfig:
    """The settings of the implementations that share the intermediate axis."""
    spec = spec_of(call.spec) if call.function == CTE else None
    given = None if spec is None else spec.shard_on_I
    return given if isinstance(given, ShardOnIConfig) else ShardOnIConfig()


def multiplies_on_intermediate(call: SimpleNamespace) -> bool:
    """Whether affinities multiply what the down weight meets."""
    if call.function == CTE:
        return bool(on_intermediate_of(call).expert_affinity_multiply_on_I)
    if call.function == BWD:
        kind = member(AffinityOption, call.affinity_option)
        return kind is AffinityOption.AFFINITY_ON_I
    return bool(getattr(call, "on_intermediate", False))


def is_dropping(call: SimpleNamespace) -> bool:
    """Whether block `e` is that of expert `e`."""
    if call.function == BWD:
        kind = member(KernelTypeOption, call.kernel_type_option)
        return kind is KernelTypeOption.DROPPING
    return implementation(call) is DROPPING


def skip_of(call: SimpleNamespace) -> SkipMode:
    """What the call leaves unread."""
    if call.function in EMITTERS:
        return SkipMode(bool(call.skip_token))
    return call.skip_dma if isinstance(call.skip_dma, SkipMode) else SkipMode()


def quantization(call: SimpleNamespace, operands: dict[str, Any]) -> Any:
    """The `QuantizationType` of the weights: NONE, ROW or MX; None for another."""
    if call.function in EMITTERS:
        return member(QuantizationType, call.quantization)
    if implementation(call) in BLOCK_SCALED:
        return QuantizationType.MX
    scales = operands["gate_up_scale"], operands["down_scale"]
    given = any(scale is not None for scale in scales)
    return QuantizationType.ROW if given else QuantizationType.NONE


def is_mx(call: SimpleNamespace) -> bool:
    """Whether the weights are block-scaled."""
    return quantization(call, operands_of(call)) is QuantizationType.MX


def _first(call: SimpleNamespace, *names: str, default: Any) -> Any:
    """The argument that the function has by one of these names."""
    return next((getattr(call, n) for n in names if hasattr(call, n)), default)


def given_scaling(call: SimpleNamespace) -> Any:
    """The scale mode that a call is given."""
    names = "expert_affinities_scaling_mode", "scaling"
    return _first(call, *names, default=ExpertAffinityScaleMode.POST_SCALE)


def given_activation(call: SimpleNamespace) -> Any:
    """The activation that a call is given."""
    names = "activation_function", "activation_type", "activation"
    return _first(call, *names, default=ActFnType.SiLU)


def scaling_of(call: SimpleNamespace) -> Any:
    """The scale mode of a call; None for what is none."""
    return member(ExpertAffinityScaleMode, given_scaling(call))


def activation_of(call: SimpleNamespace) -> Any:
    """The activation of a call; None for what is none."""
    return member(ActFnType, given_activation(call))


def weight_dtype_of(call: SimpleNamespace) -> Any:
    """The format that a call names for block-scaled weights."""
    if call.function == CTE:
        scales = quantization_of(call.quantization_config)
        return None if scales is None else scales.weight_dtype
    return getattr(call, "weight_format", None)


def limits_of(call: SimpleNamespace) -> tuple[Any, ...]:
    """The four clamp limits, in the order of `LIMITS`."""
    given = getattr(call, "clamp_limits", None)
    if given is not None:
        return (
            given.non_linear_clamp_upper_limit,
            given.non_linear_clamp_lower_limit,
            given.linear_clamp_upper_limit,
            given.linear_clamp_lower_limit,
        )
    return tuple(getattr(call, name, None) for name in LIMITS)


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rows read once shapes have the right number of axes."""
    operands = operands_of(call)
    names = ARGUMENTS[call.function]
    kind = quantization(call, operands)
    mx = kind is QuantizationType.MX
    fmt = weight_format(operands["gate_up_w"], weight_dtype_of(call)) if mx else None
    sizes = _sizes(call, operands)
    numbers = all(is_number(x, None) for x in limits_of(call))
    return sizes | dict(
        arg=SimpleNamespace(**dict(zip(ROLES, ROLES, strict=True)) | names),
        operands=operands,
        quantization_kind=kind,
        is_mx=mx,
        is_row=kind is QuantizationType.ROW,
        mx_format=fmt,
        impl=implementation(call),
        impl_name=getattr(implementation(call), "name", ""),
        scaling_kind=scaling_of(call),
        activation_kind=activation_of(call),
        given=SimpleNamespace(
            scaling=given_scaling(call), activation=given_activation(call)
        ),
        skip=skip_of(call),
        on_I=multiplies_on_intermediate(call),
        dropping=is_dropping(call),
        limits=limits_of(call),
        limits_known=numbers,
        unlike="; ".join(_unlike(operands, names, sizes, mx)),
        tiled=False,
    )


def _sizes(call: SimpleNamespace, operands: dict[str, Any]) -> dict[str, Any]:
    rows, width = operands["hidden"].shape
    experts, d_ff = operands["gate_up_w"].shape[0], operands["gate_up_w"].shape[-1]
    padding = not skip_of(call).skip_token
    # The cores of "columns" have their own of tokens and gate_up_w, and down_w whole.
    is_part = getattr(call, "shard", None) == "columns"
    return dict(
        R=rows,
        T=rows - padding,
        padding_id=rows - 1 if padding else -1,
        H=width,
        H_out=operands["down_w"].shape[-1] if is_part else width,
        E=experts,
        I=d_ff,
        B=int(call.block_size),
        N=operands["token_id"].shape[0] // int(call.block_size),
    )


def _wanted(sizes: dict[str, Any], mx: bool) -> dict[str, tuple[str, tuple]]:
    """The shape of each operand, in words and in numbers."""
    r, h, e, i, b, n = (sizes[key] for key in "RHEIBN")
    whole = sizes["H_out"]
    wanted: dict[str, tuple[str, tuple]] = dict(
        affinity=("[rows * E, 1]", (r * e, 1)),
        gate_up_w=("[E, H, 2, I]", (e, h, 2, i)),
        down_w=("[E, I, H]", (e, i, whole)),
        gate_up_b=("[E, 2, I]", (e, 2, i)),
        down_b=("[E, H]", (e, whole)),
        gate_up_scale=("[E or 1, 1, 2 I]", (e, 1, 2 * i)),
        down_scale=("[E or 1, 1, H]", (e, 1, whole)),
        gate_up=("[N, 2, I, B]", (n, 2, i, b)),
        down=("[N, B, H]", (n, b, whole)),
        d_out=("[rows, H]", (r, whole)),
        d_gate_up=("[N, 2, I, B]", (n, 2, i, b)),
        d_down=("[N, B, H]", (n, b, whole)),
    )
    if mx:
        wanted |= _wanted_blocks(h, e, i)
    return wanted


def _wanted_blocks(h: int, e: int, i: int) -> dict[str, tuple[str, tuple]]:
    p, tiles, columns = layout.partitions(i), layout.tiles(i), h // layout.TILE
    in_tiles = "ceil(I/512)"
    return dict(
        gate_up_w=("[E, 128, 2, H/512, I]", (e, 128, 2, columns, i)),
        down_w=(f"[E, Ip, {in_tiles}, H]", (e, p, tiles, h)),
        gate_up_b=(f"[E, Ip, 2, {in_tiles}, 4]", (e, p, 2, tiles, 4)),
        gate_up_scale=("[E, 16, 2, H/512, I]", (e, 16, 2, columns, i)),
        down_scale=(f"[E, Ip/8, {in_tiles}, H]", (e, p // 8, tiles, h)),
    )


def _unlike(operands, names, sizes, mx):
    """Every operand of another shape than it must have, described."""
    for role, (words, shape) in _wanted(sizes, mx).items():
        x = operands[role]
        if x is None or role not in names:
            continue
        fitting = [shape]
        if role.endswith("_scale") and not mx:
            fitting.append((1, *shape[1:]))
        if tuple(x.shape) not in fitting:
            got = tuple(x.shape)
            yield f"{names[role]} must have shape {words} = {shape}, got {got}"
    n = sizes["N"]
    experts, conditions = operands["block_expert"], operands["conditions"]
    if experts is not None and tuple(experts.shape) not in ((n,), (n, 1)):
        got = tuple(experts.shape)
        yield f"{names['block_expert']} must have shape [N] = ({n},), got {got}"
    if conditions is not None and conditions.shape[0] < n:
        got = tuple(conditions.shape)
        yield f"{names['conditions']} must have at least N = {n} entries, got {got}"
