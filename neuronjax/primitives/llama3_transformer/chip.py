"""What the chip's limits on the macros of a layer say about the stack."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from neuronjax.primitives.contracts import can
from neuronjax.primitives.llama3_transformer.facts import part_kinds


def refused_on_chip(call: SimpleNamespace) -> str:
    """The chip's limits that the stages of a layer break."""
    reports = _attention_half(call), _attended(call), _projected(call), _mlp(call)
    texts: dict[str, None] = {}
    for report in reports:
        for violation in report.violations:
            if violation.tag == "hw":
                texts[violation.message.removeprefix(f"{report.function}: ")] = None
    return "; ".join(texts)


def _like_x(call: SimpleNamespace, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(call.X.dtype))


def _attention_half(call: SimpleNamespace):
    parts = part_kinds(call)
    return can(
        "qkv_cte",
        _like_x(call, call.B, call.S, call.H),
        parts["W_qkvs"],
        fused_norm_type="RMS_NORM",
        gamma_norm_weights=parts["W_gamma_qkvs"],
        norm_eps=call.eps,
    )


def _attended(call: SimpleNamespace):
    q = _like_x(call, call.B * call.N, call.S, call.D)
    k, v = (
        _like_x(call, call.B * call.G, *sizes)
        for sizes in ((call.D, call.S), (call.S, call.D))
    )
    return can("attention_cte", q, k, v)


def _projected(call: SimpleNamespace):
    heads = _like_x(call, call.B, call.N, call.D, call.S)
    return can("output_projection_cte", heads, part_kinds(call)["W_outs"])


def _mlp(call: SimpleNamespace):
    parts = part_kinds(call)
    weights = (parts[name] for name in ("W_gates", "W_ups", "W_downs"))
    x = _like_x(call, call.B, call.S, call.H)
    gamma = parts["W_gamma_mlps"]
    return can("mlp_kernel", x, *weights, gamma=gamma, norm="rms", eps=call.eps)
