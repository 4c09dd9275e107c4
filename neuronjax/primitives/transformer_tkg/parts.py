"""What the macros of a layer refuse, asked for once for layers of the same shapes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.primitives.contracts import can


def refusals(call: SimpleNamespace) -> dict[str, str]:
    """By tag, what the macros of the first layer that breaks a rule refuse."""
    found, judged = dict(math="", hw=""), set()
    for i, view in enumerate(call.views):
        kinds = tuple(
            None if x is None else (tuple(x.shape), jnp.dtype(x.dtype))
            for x in view.values()
        )
        if kinds in judged:
            continue
        judged.add(kinds)
        for tag, text in _refused(call, view).items():
            found[tag] = found[tag] or (text and f"layer {i}: {text}")
    return found


def _refused(call: SimpleNamespace, view: dict[str, Any]) -> dict[str, str]:
    abstract = jax.ShapeDtypeStruct
    x, group = call.X, call.G
    like = {
        name: None if t is None else abstract(t.shape, t.dtype)
        for name, t in view.items()
    }
    h = abstract(x.shape, x.dtype)
    k, v = (
        abstract((call.B, 1, *like[name].shape[2:]), like[name].dtype)
        for name in ("K_caches", "V_caches")
    )
    mask = abstract((call.S_ctx, call.B, call.n, call.S), jnp.bool)
    attention = can(
        "attention_block_tkg_kernel",
        *(h, _part(like["W_qkvs"], 1, group), k, v, mask),
        rmsnorm_X_enabled=True,
        rmsnorm_X_eps=call.eps,
        rmsnorm_X_gamma=like["W_gamma_qkvs"],
        cos=abstract(call.RoPE_cos.shape, call.RoPE_cos.dtype),
        sin=abstract(call.RoPE_sin.shape, call.RoPE_sin.dtype),
        K_cache_transposed=True,
        update_cache=False,
        W_out=_part(like["W_outs"], 0, group),
        lnc_axis=call.lnc_axis,
    )
    reports = attention, _of_mlp(call, h, like)
    texts: dict[str, list[str]] = dict(math=[], hw=[])
    for report in reports:
        for violation in report.violations:
            own = violation.message.removeprefix(f"{report.function}: ")
            texts[violation.tag].append(own)
    return {kind: "; ".join(found) for kind, found in texts.items()}


def _of_mlp(call: SimpleNamespace, h: Any, like: dict[str, Any]) -> Any:
    weights = (like[name] for name in ("W_gates", "W_ups", "W_downs"))
    norm: dict[str, Any] = dict(gamma=like["W_gamma_mlps"], norm="rms", eps=call.eps)
    if like["W_gate_scales"] is None:
        return can("mlp_kernel", h, *weights, **norm)
    columns = like["W_ups"].shape[1]
    return can(
        "quant_mlp_kernel",
        *(h, *weights),
        jax.ShapeDtypeStruct((2, columns), jnp.float32),
        jax.ShapeDtypeStruct((1, call.H), jnp.float32),
        activation_clipping_bound=call.clamp_bound,
        force_tkg_mode=True,
        **norm,
    )


def _part(x: Any, axis: int, groups: int) -> Any:
    """One key/value head's part of a weight."""
    shape = list(x.shape)
    shape[axis] //= groups
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
