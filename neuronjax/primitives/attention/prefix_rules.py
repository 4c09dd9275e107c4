"""The rules of `attention_prefix_caching_fwd_kernel`."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention.operand_kinds import (
    is_mask,
    is_wide_float,
    not_array,
)
from neuronjax.primitives.attention.prefill_facts import (
    mask_misfit,
    misfit,
    one_value,
)
from neuronjax.primitives.attention.prefill_rules import UNIT_SCALE
from neuronjax.primitives.contracts import Contract, add
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.kinds import is_number
from neuronjax.primitives.registry import PREFIX_CACHING_NAMES
from neuronjax.primitives.tile import MemrefTile

_KERNEL = ("attention_prefix_caching_fwd_kernel",)
_ARRAYS = ("q", "k", "v", "k_prior", "v_prior")
_OPERANDS = (*_ARRAYS, "prior_used_len", "prefix_mask", "mask", "sink")
_NAME = "AttentionMMSoftmaxMMWithoutSwap"


def prefix_facts(call: SimpleNamespace) -> dict[str, Any]:
    """Sizes, and what does not fit them."""
    heads, *rows = call.q.shape
    kv_heads, kv_seq, value_dim = call.v.shape
    q_seq, d = rows if call.tp_q else rows[::-1]
    prior = call.v_prior.shape[1]

    def keys(seq: int) -> tuple[int, ...]:
        return (kv_heads, seq, d) if call.tp_k else (kv_heads, d, seq)

    wanted = dict(
        k=keys(kv_seq),
        k_prior=keys(prior),
        v_prior=(kv_heads, prior, value_dim),
        prior_used_len=(1,),
        sink=(heads, 1),
    )
    masks = dict(prefix_mask=prior, mask=kv_seq)
    return dict(
        heads=heads,
        kv_heads=kv_heads,
        prior=prior,
        misfit=misfit(call, wanted),
        mask_misfit=_mask_misfit(call, masks, (heads, q_seq)),
        used=one_value(call.prior_used_len),
        name=call.kernel_name,
        tiled=False,
    )


def _mask_misfit(call: SimpleNamespace, masks: dict[str, int], rows: tuple) -> str:
    for name, columns in masks.items():
        mask = getattr(call, name)
        if mask is None:
            continue
        shape = (*rows, columns)
        if mask_misfit(mask, shape) or not is_mask(mask):
            wanted = "[{}]".format(", ".join(f"1 or {n}" for n in shape))
            got = f"{mask.dtype} {tuple(mask.shape)}"
            return f"{name} must be boolean or integer, {wanted}, got {got}"
    return ""


def _arguments(**changes: Any):
    def build(function: str) -> dict[str, Any]:
        shapes: dict[str, Any] = dict(
            q=(4, 8, 3),
            k=(2, 8, 5),
            v=(2, 5, 6),
            k_prior=(2, 8, 4),
            v_prior=(2, 4, 6),
            kernel_name=_NAME,
        )
        return {
            key: np.zeros(value, np.float32) if isinstance(value, tuple) else value
            for key, value in (shapes | changes).items()
        }

    return build


def _row(rule: str, message: str, violated, **kwargs: Any) -> None:
    text = message if kwargs.get("literal") else "{function}: " + message
    add(Contract(f"prefix_caching.{rule}", _KERNEL, text, violated, **kwargs))


add(*only_flags(*_KERNEL))
_row(
    "name",
    "Prefix caching is not implemented for this kernel name {kernel_name}",
    lambda c: c.kernel_name not in PREFIX_CACHING_NAMES,
    example=_arguments(kernel_name="AttentionMMSoftmaxMM"),
    stage=0,
    literal=True,
)
_row(
    "arrays",
    "{not_array}",
    lambda c: vars(c).setdefault(
        "not_array", not_array(c, _ARRAYS, True) or not_array(c, _OPERANDS)
    ),
    example=_arguments(prior_used_len=3),
    stage=-1,
)
_row(
    "tiles",
    "the prefix-caching leaf takes tensors, got a tile",
    lambda c: any(isinstance(getattr(c, name), MemrefTile) for name in _ARRAYS),
    example=lambda function: dict(
        _arguments()(function), q=MemrefTile.from_tensor(np.zeros((4, 8, 3)), 1)
    ),
    stage=0,
)
_row(
    "scale_kind",
    "scale must be a finite number that is known while tracing, got {scale!r}",
    lambda c: not is_number(c.scale) or not np.isfinite(c.scale),
    example=_arguments(scale="2"),
    stage=0,
)
_row(
    "rank",
    "q, k, v, k_prior and v_prior must have 3 axes, heads first, and none empty, got "
    "{q.shape}, {k.shape}, {v.shape}, {k_prior.shape} and {v_prior.shape}",
    lambda c: any(
        len(x.shape) != 3 or 0 in x.shape for x in (getattr(c, n) for n in _ARRAYS)
    ),
    example=_arguments(q=(1, 4, 8, 3)),
    stage=0,
)
_row(
    "dtypes",
    "q, k, v, k_prior and v_prior must have one floating dtype, got {q.dtype}, "
    "{k.dtype}, {v.dtype}, {k_prior.dtype} and {v_prior.dtype}",
    lambda c: (
        len({getattr(c, n).dtype for n in _ARRAYS}) != 1
        or not jnp.issubdtype(c.q.dtype, jnp.floating)
        or jnp.dtype(c.q.dtype).itemsize < 2
    ),
    example=_arguments(k_prior=np.zeros((2, 8, 4), jnp.bfloat16)),
    stage=0,
)
_row(
    "scale",
    UNIT_SCALE,
    lambda c: "Causal" in c.kernel_name and float(c.scale) != 1.0,
    example=_arguments(kernel_name=f"Causal{_NAME}", scale=0.5),
    literal=True,
)
_row(
    "group",
    "heads of q must be a multiple of those of k, got {heads} and {kv_heads}",
    lambda c: c.heads % c.kv_heads != 0,
    example=_arguments(q=(3, 8, 3)),
)
_row(
    "shapes",
    "{misfit}",
    lambda c: c.misfit,
    example=_arguments(v_prior=(2, 3, 6)),
)
_row(
    "sink",
    "sink must have a floating dtype, got {sink.dtype}",
    lambda c: not is_wide_float(c.sink),
    example=_arguments(sink=np.zeros((4, 1), np.int32)),
)
_row(
    "masks",
    "{mask_misfit}",
    lambda c: c.mask_misfit,
    example=_arguments(prefix_mask=np.ones((1, 1, 5), bool)),
)
_row(
    "used_len",
    "prior_used_len must be an integer in [0, {prior}], the slots of the prior, got "
    "{prior_used_len.dtype} {used}",
    lambda c: (
        c.prior_used_len is not None
        and (
            not jnp.issubdtype(c.prior_used_len.dtype, jnp.integer)
            or (c.used is not None and not 0 <= c.used <= c.prior)
        )
    ),
    example=_arguments(prior_used_len=np.array([5], np.int32)),
)
