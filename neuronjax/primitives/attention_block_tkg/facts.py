"""What the rules of the decode block read from a call."""

import math
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3, is_fp8
from neuronjax.primitives.known import is_epsilon, known
from neuronjax.primitives.mesh_axes import bound_size
from neuronjax.primitives.options import QuantizationType, member, odd_dtype
from neuronjax.primitives.output_projection.rules import core_count

PUBLIC, EMITTER = "attention_block_tkg", "attention_block_tkg_kernel"
BOTH = (PUBLIC, EMITTER)
# The operand of the kernel behind each argument, in the kernel's order.
OPERANDS = dict(
    X="x",
    rmsnorm_X_gamma="x_gain",
    W_qkv="w_qkv",
    bias_qkv="bias_qkv",
    weight_dequant_scale_qkv="qkv_scale",
    input_dequant_scale_qkv="qkv_in_scale",
    rmsnorm_QK_pre_rope_W_Q="q_pre_gain",
    rmsnorm_QK_pre_rope_W_K="k_pre_gain",
    cos="cos",
    sin="sin",
    rmsnorm_QK_post_rope_W_Q="q_post_gain",
    rmsnorm_QK_post_rope_W_K="k_post_gain",
    K_cache="k_cache",
    V_cache="v_cache",
    attention_mask="mask",
    active_blocks_table="table",
    kv_cache_update_idx="position",
    sink="sink",
    k_scale="k_scale",
    v_scale="v_scale",
    W_out="w_out",
    bias_out="bias_out",
    weight_dequant_scale_out="out_scale",
    input_dequant_scale_out="out_in_scale",
)
NEEDED = ("X", "W_qkv", "K_cache", "V_cache")
GAINS = tuple(
    f"rmsnorm_QK_{side}_rope_W_{kind}" for side in ("pre", "post") for kind in "QK"
)
SCALES = {
    "qkv": ("weight_dequant_scale_qkv", "input_dequant_scale_qkv"),
    "out": ("weight_dequant_scale_out", "input_dequant_scale_out"),
}
_INTEGERS = ("active_blocks_table", "kv_cache_update_idx")
# What "no write for this sequence" is, as uint32 and as int32.
NO_WRITE = (0xFFFFFFFF, -1)


def shape_of(x: Any) -> tuple | None:
    """The shape of an operand; `None` for what is absent."""
    return None if x is None else tuple(x.shape)


def misplaced(call: SimpleNamespace) -> str:
    """The first operand that is missing, or no array; empty if there is none."""
    for name in OPERANDS:
        x = getattr(call, name)
        if x is None and name in NEEDED:
            return f"{name} must be given"
        if x is not None and not isinstance(
            x, jax.Array | np.ndarray | jax.ShapeDtypeStruct
        ):
            return f"{name} must be an array, got {type(x).__name__}"
    return ""


def ranks(call: SimpleNamespace) -> str:
    """The first of the operands that give the sizes whose rank is wrong."""
    wanted = dict(X=((3,), "[B, S, H]"), W_qkv=((2,), "[H, (N + 2)*D]"))
    caches = (3, 4), "3 axes, or 4 of which the second is 1"
    wanted |= dict(K_cache=caches, V_cache=caches)
    for name, (counts, words) in wanted.items():
        x = getattr(call, name)
        if x is None or not hasattr(x, "shape"):
            continue
        if len(x.shape) not in counts or (len(x.shape) == 4 and x.shape[1] != 1):
            return f"{name} must have shape {words}, got {tuple(x.shape)}"
    return ""


def traced(call: SimpleNamespace) -> str:
    """The first setting that is no Python number, described; empty if none is."""
    for side in ("X", "QK_pre_rope", "QK_post_rope"):
        eps = getattr(call, f"rmsnorm_{side}_eps")
        try:
            wrong = eps is not None and not is_epsilon(eps)
        except (TypeError, ValueError):
            wrong = True
        if wrong:
            return f"rmsnorm_{side}_eps = {_shown(eps)}"
    settings = {name: getattr(call, name) for name in ("X_hidden_dim_actual", "lnc")}
    counts = {name: x for name, x in settings.items() if x is not None}
    for name, count in (counts | dict(KVDP=call.KVDP)).items():
        try:
            operator.index(count)
        except TypeError:
            return f"{name} = {_shown(count)}"
    return ""


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str) else str(type(value))


def facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes, layouts and kinds of a call that keeps the rules of the first stage."""
    batch, seq, width = call.X.shape
    head_dim, columns = call.V_cache.shape[-1], call.W_qkv.shape[1]
    heads = columns // head_dim - 2 if head_dim else 0
    group = max(operator.index(call.KVDP), 1)
    own = batch // group
    table = shape_of(call.active_blocks_table)
    mask = shape_of(call.attention_mask)
    kinds = {
        side: member(QuantizationType, getattr(call, f"quantization_type_{side}"))
        for side in SCALES
    }
    fp8 = call.k_scale is not None and call.v_scale is not None
    found: dict[str, Any] = dict(
        B=batch,
        S=seq,
        H=width,
        D=head_dim,
        N=heads,
        group=group,
        own=own,
        all_heads=heads * group,
        qkv_kind=kinds["qkv"],
        out_kind=kinds["out"],
        out_width=_out_width(call, width),
        cores=core_count(call.lnc, _out_width(call, width)),
        blocked=table is not None,
        fp8=fp8,
        visible=mask[0] if mask else 0,
        is_skipped=bool(call.skip_attention),
        shapes={name: shape_of(getattr(call, name)) for name in OPERANDS},
        tiled=False,
    )
    found |= _caches(call, own, seq, head_dim)
    return found | dict(
        odd=_odd(call, kinds),
        odd_scale=_odd_scale(call),
        odd_cache=_odd_cache(call, fp8),
        odd_integer=_odd_integer(call),
        outside=_outside(call, seq, found["capacity"]),
        odd_factor=_odd_factor(call.softmax_scale),
        group_size=bound_size(call.KVDP_replica_group),
    )


def _out_width(call: SimpleNamespace, width: int) -> int:
    """The columns of `W_out`: the emitter takes a part of those of `X`."""
    shape = shape_of(call.W_out)
    is_part = call.function == EMITTER and shape is not None and len(shape) == 2
    return shape[1] if is_part else width


def _caches(call: SimpleNamespace, own: int, seq: int, head_dim: int) -> dict[str, Any]:
    """The caches' shapes without a head axis, those wanted, and the slots."""
    k, v = ((x.shape[0], *x.shape[-2:]) for x in (call.K_cache, call.V_cache))
    turned = bool(call.K_cache_transposed)
    if call.active_blocks_table is not None:
        return dict(k_shape=k, v_shape=v, k_wanted=v, capacity=v[0] * v[1])
    wanted = (v[0], v[2], v[1]) if turned else v
    return dict(k_shape=k, v_shape=v, k_wanted=wanted, capacity=v[1])


def _odd(call: SimpleNamespace, kinds: dict[str, Any]) -> str:
    """The first float operand of a dtype that is not built."""
    skipped = {*_INTEGERS, "attention_mask", *sum(SCALES.values(), ())}
    skipped |= {"k_scale", "v_scale"}
    skipped |= {
        name for name in ("K_cache", "V_cache") if is_fp8(getattr(call, name).dtype)
    }
    for side in SCALES:
        weight = getattr(call, f"W_{side}")
        if kinds[side] not in (None, QuantizationType.NONE) and weight is not None:
            skipped |= {f"W_{side}"} if is_fp8(weight.dtype) else set()
    checked = {n: getattr(call, n) for n in OPERANDS if n not in skipped}
    return odd_dtype(checked)


def _odd_scale(call: SimpleNamespace) -> str:
    for name in (*sum(SCALES.values(), ()), "k_scale", "v_scale"):
        x = getattr(call, name)
        if x is not None and x.dtype != jnp.float32:
            return f"{name} of dtype {x.dtype}"
    return ""


def _odd_cache(call: SimpleNamespace, fp8: bool) -> str:
    """What is wrong with the caches' dtypes; empty if nothing is."""
    dtypes = call.K_cache.dtype, call.V_cache.dtype
    got = f", got {dtypes[0]} and {dtypes[1]}"
    if not fp8:
        narrow = any(map(is_fp8, dtypes))
        return "fp8 caches need k_scale and v_scale" + got if narrow else ""
    if call.round_activations:
        return (
            ""
            if set(dtypes) == {E4M3}
            else ("with k_scale and v_scale the caches must be float8_e4m3" + got)
        )
    return (
        ""
        if not any(map(is_fp8, dtypes))
        else (
            "round_activations=False keeps keys and values as they are: the caches "
            "must be of a wider dtype than fp8" + got
        )
    )


def _odd_factor(scale: Any) -> str:
    """What is wrong with a scale of the softmax; empty if nothing is."""
    if scale is None or (isinstance(scale, int | float) and math.isfinite(scale)):
        return ""
    dtype, shape = getattr(scale, "dtype", None), getattr(scale, "shape", None)
    if shape == () and dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return ""
    return _shown(scale) if shape is None else f"shape {shape} of dtype {dtype}"


def _odd_integer(call: SimpleNamespace) -> str:
    for name in _INTEGERS:
        x = getattr(call, name)
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            return f"{name} must hold integers, got dtype {x.dtype}"
    mask = call.attention_mask
    if mask is not None and jnp.issubdtype(mask.dtype, jnp.inexact):
        return f"attention_mask must be boolean or integer, got dtype {mask.dtype}"
    return ""


def _outside(call: SimpleNamespace, seq: int, capacity: int) -> str:
    """The first known write that does not fit, described; empty if all do."""
    held = known(call.kv_cache_update_idx)
    if held is None or not call.update_cache or held.dtype.kind not in "iu":
        return ""
    for index in map(int, held.ravel()):
        if index not in NO_WRITE and not 0 <= index <= capacity - seq:
            return str(index)
    return ""
