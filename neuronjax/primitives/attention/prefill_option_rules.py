"""The rules of the options that `attention_cte` alone has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention.operand_kinds import (
    is_mask,
    is_scale,
    is_soft_cap,
    is_wide_float,
    not_array,
)
from neuronjax.primitives.attention.prefill_rules import CTE, REACH, arguments, row
from neuronjax.primitives.contracts import Contract, Size, add
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import is_number

_PRIOR = ("k_prior", "v_prior", "prior_used_len")
_BOUNDS = ("bound_min", "bound_max")


def _cte(rule: str, message: str, violated=None, **kwargs: Any) -> None:
    row(rule, message, violated, (CTE,), **kwargs)


_ARRAYS = (*_PRIOR, *_BOUNDS, "sink", "cp_offset", "mask", "bias")


def _setting(call: Any) -> str:
    """The first setting of the wrong kind, described; they are known while tracing."""
    for name in ("sliding_window", "global_cp_deg"):
        if not isinstance(getattr(call, name), int | np.integer | None):
            return f"{name} must be an integer or None, got {getattr(call, name)!r}"
    if not is_number(call.logits_soft_cap, None):
        return f"logits_soft_cap must be a number or None, got {call.logits_soft_cap!r}"
    if not is_number(call.dropout_rate):
        return f"dropout_rate must be a number, got {call.dropout_rate!r}"
    return ""


def _some(call: Any, names: tuple[str, ...]) -> bool:
    """Whether some of the arguments are given, and not all."""
    absent = [getattr(call, name) is None for name in names]
    return any(absent) and not all(absent)


def _is_key(key: Any, heads: int) -> bool:
    """A typed key, or the raw data of one; or one a head."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is None:
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape in ((), (heads,))
    return dtype == jnp.uint32 and shape in ((2,), (heads, 2))


def _dtype(name: Any) -> Any:
    """The dtype that `name` means; None if it means none."""
    try:
        return jnp.dtype(name)
    except TypeError:
        return None


def _is_one(scale: Any) -> bool:
    """Whether a scale is known to be 1."""
    return isinstance(scale, int | float) and float(scale) == 1.0


def _is_real(x: Any) -> bool:
    kinds = jnp.floating, jnp.integer
    return any(jnp.issubdtype(x.dtype, kind) for kind in kinds)


def _prior(**changes: Any):
    shapes: Any = dict(k_prior=(2, 8, 4), v_prior=(2, 4, 6), prior_used_len=(1,))
    return arguments(**(shapes | changes))


def _shard(**changes: Any):
    given: Any = dict(cp_offset=(1, 1), global_cp_deg=2)
    return arguments(**(given | changes))


def _limited(call: Any) -> bool:
    """Whether a window, a prefix or a shard asks the chip for scale 1."""
    return bool(call.sliding_window or call.k_prior is not None or call.global_cp_deg)


add(*only_flags(CTE))
_cte(
    "arrays",
    "{not_array}",
    lambda c: vars(c).setdefault("not_array", not_array(c, _ARRAYS)),
    example=arguments(sink=[0.0] * 4),
    stage=-1,
)
_cte(
    "settings",
    "{setting}",
    lambda c: vars(c).setdefault("setting", _setting(c)),
    example=arguments(sliding_window=2.5),
    stage=0,
)
_cte(
    "scale_kind",
    "scale must be a finite real number, a scalar array or None, got {scale!r}",
    lambda c: not is_scale(c.scale),
    example=arguments(scale="2.0"),
    stage=0,
)
_cte(
    "prior_together",
    "k_prior, v_prior and prior_used_len must be given together",
    lambda c: _some(c, _PRIOR),
    example=arguments(k_prior=(2, 8, 4)),
    stage=0,
)
_cte(
    "prior_rank",
    "k_prior and v_prior must have 3 axes, heads first, and none empty, got "
    "{k_prior.shape} and {v_prior.shape}",
    lambda c: (
        not _some(c, ("k_prior", "v_prior"))
        and c.k_prior is not None
        and any(len(x.shape) != 3 or 0 in x.shape for x in (c.k_prior, c.v_prior))
    ),
    example=_prior(v_prior=(2, 4, 6, 1)),
    stage=0,
)
_cte(
    "bounds_together",
    "bound_min and bound_max must be given together",
    lambda c: _some(c, _BOUNDS),
    example=arguments(bound_min=(3, 1)),
    stage=0,
)
_cte(
    "option_shapes",
    "{misfit}",
    lambda c: c.misfit,
    example=arguments(sink=(3, 1)),
)
_cte(
    "prior_dtype",
    "k_prior and v_prior must have the dtype of k and v, got {k_prior.dtype} and "
    "{v_prior.dtype} with {k.dtype}",
    lambda c: (
        c.k_prior is not None and {c.k_prior.dtype, c.v_prior.dtype} != {c.k.dtype}
    ),
    example=_prior(v_prior=np.zeros((2, 4, 6), jnp.bfloat16)),
)
_cte(
    "used_len_dtype",
    "prior_used_len must be integers, got {prior_used_len.dtype}",
    lambda c: (
        c.prior_used_len is not None
        and not jnp.issubdtype(c.prior_used_len.dtype, jnp.integer)
    ),
    example=_prior(prior_used_len=np.zeros(1, np.float32)),
)
_cte(
    "used_len",
    "prior_used_len must lie in [0, {prior}], the slots of the prior, got {used}",
    lambda c: c.used is not None and c.prior is not None and not 0 <= c.used <= c.prior,
    example=_prior(prior_used_len=np.array([5], np.int32)),
)
_cte(
    "offset_dtype",
    "cp_offset must be integers, got {cp_offset.dtype}",
    lambda c: (
        c.cp_offset is not None and not jnp.issubdtype(c.cp_offset.dtype, jnp.integer)
    ),
    example=_shard(cp_offset=np.zeros((1, 1), np.float32)),
)
_cte(
    "offset",
    "cp_offset must be at least 0, got {offset}",
    lambda c: c.offset is not None and c.offset < 0,
    example=_shard(cp_offset=np.full((1, 1), -1, np.int32)),
)
_cte(
    "cp_together",
    "cp_offset must be given for global_cp_deg above 1, and global_cp_deg for "
    "cp_strided_q_slicing, got {global_cp_deg}",
    lambda c: (
        ((c.global_cp_deg or 1) > 1 and c.cp_offset is None)
        or (c.cp_strided_q_slicing and c.global_cp_deg is None)
    ),
    example=arguments(global_cp_deg=2),
)
_cte(
    "cp_reach",
    "the positions of {q_seq} queries, {global_cp_deg} apart, must be below 2**31",
    lambda c: c.cp_strided_q_slicing and c.q_seq * (c.global_cp_deg or 1) >= 2**30,
    example=_shard(global_cp_deg=2**30, cp_strided_q_slicing=True),
)
_cte(
    "cp_degree",
    "global_cp_deg must be at least 1, got {global_cp_deg}",
    lambda c: c.global_cp_deg is not None and c.global_cp_deg < 1,
    example=_shard(global_cp_deg=0),
)
_cte(
    "window",
    "sliding_window must be a number of keys, at least 0, got {sliding_window}",
    lambda c: c.sliding_window is not None and c.sliding_window < 0,
    example=arguments(sliding_window=-1),
)
_cte(
    "causal_alone",
    "sliding_window needs causal_mask, got {causal_mask}",
    lambda c: not c.causal_mask and bool(c.sliding_window),
    example=arguments(sliding_window=2, causal_mask=False),
)
_cte(
    "bounds_alone",
    "bound_min and bound_max are columns of k: they do not come with a prior, got "
    "{options}",
    lambda c: c.bound_min is not None and c.k_prior is not None,
    example=_prior(bound_min=(3, 1), bound_max=(3, 1)),
)
_cte(
    "bounds_dtype",
    "bound_min and bound_max must be real numbers, got {bound_min.dtype} and "
    "{bound_max.dtype}",
    lambda c: (
        c.bound_min is not None
        and not all(_is_real(x) for x in (c.bound_min, c.bound_max))
    ),
    example=arguments(bound_min=np.ones((3, 1), bool), bound_max=(3, 1)),
)
_cte(
    "softmax_dtype",
    "softmax_dtype must be float32 or bfloat16, got {softmax_dtype}",
    lambda c: _dtype(c.softmax_dtype) not in (jnp.float32, jnp.bfloat16),
    example=arguments(softmax_dtype="float16"),
)
_cte(
    "mm_out_dtype",
    "mm_out_dtype must be float32, or bfloat16 on gen4, got {mm_out_dtype} on {target}",
    lambda c: (
        _dtype(c.mm_out_dtype) not in (jnp.float32, jnp.bfloat16)
        or (_dtype(c.mm_out_dtype) == jnp.bfloat16 and c.target != "gen4")
    ),
    example=arguments(mm_out_dtype="bfloat16"),
)
_cte(
    "sink_dtype",
    "sink must have a floating dtype, got {sink.dtype}",
    lambda c: not is_wide_float(c.sink),
    example=arguments(sink=np.zeros((4, 1), np.int32)),
)
_cte(
    "cte_mask_shape",
    "mask must have shape [1 or {scores[0]}, 1 or {scores[1]}, 1 or {scores[2]}], got "
    "{mask.shape}",
    lambda c: c.mask_misfit,
    example=arguments(mask=np.ones((1, 2, 5), bool)),
)
_cte(
    "cte_mask_dtype",
    "mask must be boolean or integer, got {mask.dtype}: bias is the additive one",
    lambda c: not is_mask(c.mask),
    example=arguments(mask=(1, 1, 5)),
)
_cte(
    "bias_shape",
    "bias must have shape [1 or {scores[0]}, 1 or {scores[1]}, 1 or {scores[2]}], got "
    "{bias.shape}",
    lambda c: c.bias_misfit,
    example=arguments(bias=(1, 2, 5)),
)
_cte(
    "bias_dtype",
    "bias must have a floating dtype, got {bias.dtype}: mask is the boolean one",
    lambda c: not is_wide_float(c.bias),
    example=arguments(bias=np.ones((1, 1, 5), bool)),
)
_cte(
    "soft_cap",
    "logits_soft_cap must lie in [1e-30, 1e30], or be None, got {logits_soft_cap}",
    lambda c: not is_soft_cap(c.logits_soft_cap),
    example=arguments(logits_soft_cap=-1.0),
)
_cte(
    "dropout_rate",
    "dropout_rate must lie in [0, 1), got {dropout_rate}",
    lambda c: not 0 <= c.dropout_rate < 1,
    example=arguments(dropout_rate=1.0),
)
_cte(
    "dropout_key",
    "dropout_key must be a random key, or {heads} of them, for a dropout_rate of "
    "{dropout_rate}, got "
    "{dropout_key}",
    lambda c: c.dropout_rate != 0 and not _is_key(c.dropout_key, c.heads),
    example=arguments(dropout_rate=0.5),
)
_cte(
    "tiled_cte",
    "tiles take no {options}: pass tensors",
    lambda c: c.tiled and c.options,
    example=arguments(tiles=True, sliding_window=2),
)
_cte(
    "chip_scale",
    "the chip takes scale 1 with a window, a prior or parts of a sequence, got {scale}",
    lambda c: _limited(c) and not _is_one(c.scale),
    example=arguments(sliding_window=2, scale=0.5),
    tag="hw",
)
_cte(
    "chip_columns",
    "the chip takes at most 131072 keys with those of the prior, got {value}",
    size=Size("columns", lambda c: c.columns, maximum=REACH),
    example=arguments(
        q=(1, 1, 1),
        k=(1, 1, REACH),
        v=(1, REACH, 1),
        k_prior=(1, 1, 1),
        v_prior=(1, 1, 1),
        prior_used_len=(1,),
    ),
    tag="hw",
)
_cte(
    "chip_window",
    "the chip takes a window of at most 131072, got {value}",
    size=Size("W", lambda c: c.sliding_window or 0, minimum=0, maximum=REACH),
    example=arguments(sliding_window=REACH + 1),
    tag="hw",
)
_cte(
    "chip_cp_degree",
    "the chip takes at most 32 parts of a sequence, got {value}",
    size=Size("degree", lambda c: c.global_cp_deg or 1, maximum=32),
    example=_shard(global_cp_deg=33),
    tag="hw",
)
_cte(
    "chip_parts",
    "the chip takes parts of a sequence with causal_mask alone, got {causal_mask}",
    lambda c: not c.causal_mask and c.cp_offset is not None,
    example=_shard(causal_mask=False),
    tag="hw",
)
_cte(
    "chip_bounds",
    "the chip takes bounds without parts of a sequence, got global_cp_deg = "
    "{global_cp_deg}",
    lambda c: c.bound_min is not None and (c.global_cp_deg or 1) > 1,
    example=_shard(bound_min=(3, 1), bound_max=(3, 1)),
    tag="hw",
)
add(
    Contract(
        "attention.chip_dropout",
        (CTE,),
        "Backwards Attention BIR kernel does not currently support non zero dropout "
        "prob",
        lambda c: c.dropout_rate != 0,
        example=arguments(dropout_rate=0.5, dropout_key=np.zeros(2, np.uint32)),
        tag="hw",
        literal=True,
    )
)
