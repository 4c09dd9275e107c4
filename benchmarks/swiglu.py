"""The SwiGLU feed-forward block, 2048 tokens, forward and forward + backward."""

from collections.abc import Callable
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Target,
    Work,
    Workload,
    jax_forward_backward,
    jax_work,
    slow_bfloat16,
    torch_work,
)

CASES = {
    f"{mode}_{dtype}": {
        "tokens": 2048,
        "d_model": 1024,
        "d_ff": 2816,
        "mode": mode,
        "dtype": dtype,
    }
    for dtype in ("float32", "bfloat16")
    for mode in ("forward", "backward")
}


def ideal(case: Case) -> dict[str, float]:
    """Three products forward, six more backward."""
    weights = 3 * case["d_model"] * case["d_ff"]
    backward = case["mode"] == "backward"
    size = 2 if case["dtype"] == "bfloat16" else 4
    activations = case["tokens"] * case["d_model"]
    passes = 3 if backward else 1
    return {
        "flops": 2.0 * case["tokens"] * weights * passes,
        "bytes": float(size * passes * (weights + 2 * activations)),
    }


def _inputs(case: Case) -> list[Any]:
    """The activations, the three weights, and the cotangent, float32."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens, d_model, d_ff = case["tokens"], case["d_model"], case["d_ff"]
    shapes = [(tokens, d_model), (d_model, d_ff), (d_model, d_ff)]
    shapes += [(d_ff, d_model), (tokens, d_model)]
    gains = (1, 0.03, 0.03, 0.02, 1)
    return [
        rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)
        for shape, gain in zip(shapes, gains, strict=True)
    ]


def _jax_side(block: Callable) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax.numpy as jnp

        args = [jnp.asarray(x, case["dtype"]) for x in _inputs(case)]
        if case["mode"] == "backward":
            return jax_forward_backward(block, *args)
        return jax_work(block, *args[:-1])

    return build


def _jnp(x, gate, up, down):
    import jax

    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _jnp_wide(x, gate, up, down):
    """The same with float32 accumulation asked for."""
    import jax
    import jax.numpy as jnp

    def dot(a, b):
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    hidden = jax.nn.silu(dot(x, gate)) * dot(x, up)
    return dot(hidden.astype(x.dtype), down).astype(x.dtype)


def _neuronjax(x, gate, up, down):
    import neuronjax

    (out,) = neuronjax.mlp(x[None], gate, up, down)
    return out[0]


def _torch(case: Case) -> Work:
    import torch
    from torch.nn.functional import silu

    dtype = getattr(torch, case["dtype"])
    inputs = [torch.from_numpy(x).to(dtype) for x in _inputs(case)]

    def block(x, gate, up, down):
        return (silu(x @ gate) * (x @ up)) @ down

    return torch_work(block, inputs, backward=case["mode"] == "backward")


WORKLOAD = Workload(
    name="swiglu",
    title="SwiGLU",
    cases=CASES,
    sides={
        "torch": Side(_torch, "torch", skip=slow_bfloat16),
        "jnp": Side(_jax_side(_jnp)),
        "jnp_float32_accumulation": Side(_jax_side(_jnp_wide)),
        "neuronjax": Side(_jax_side(_neuronjax)),
    },
    ideal=ideal,
    targets=(
        # "No slower" leaves the rounds' own spread, five in a hundred.
        Target("neuronjax", "*_float32", "ms", 1.05, "jnp"),
        Target("neuronjax", "*_bfloat16", "ms", 0.6, "jnp"),
        Target("neuronjax", "*_bfloat16", "ms", 1.15, "torch"),
    ),
)
