"""The router of a mixture of experts: logits, top-k, softmax over the chosen ones."""

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
    torch_work,
)

SIZES = {
    "T32_H3072_E128_k4": (32, 3072, 128, 4),
    "T1024_H3072_E256_k4": (1024, 3072, 256, 4),
    "T1024_H8192_E128_k8": (1024, 8192, 128, 8),
}
CASES = {
    f"{mode}_{name}": {
        **dict(zip(("tokens", "d_model", "num_experts", "k"), sizes, strict=True)),
        "mode": mode,
    }
    for name, sizes in SIZES.items()
    for mode in ("forward", "backward")
}


def ideal(case: Case) -> dict[str, float]:
    """One product forward, two more backward."""
    tokens, d_model, experts = case["tokens"], case["d_model"], case["num_experts"]
    passes = 3 if case["mode"] == "backward" else 1
    return {
        "flops": 2.0 * tokens * d_model * experts * passes,
        "bytes": 4.0 * passes * (tokens * (d_model + 2 * experts) + d_model * experts),
    }


def _inputs(case: Case) -> list[Any]:
    """The activations, the weight, the bias, and the affinities' cotangent."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens, d_model, experts = case["tokens"], case["d_model"], case["num_experts"]
    shapes = (tokens, d_model), (d_model, experts), (experts,), (tokens, experts)
    gains = (1, 0.02, 0.02, 1)
    return [
        rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)
        for shape, gain in zip(shapes, gains, strict=True)
    ]


def _jax_side(route: Callable) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax.numpy as jnp

        args = list(map(jnp.asarray, _inputs(case)))

        def affinities(x, w, b):
            return route(x, w, b, case["k"])

        if case["mode"] == "backward":
            return jax_forward_backward(affinities, *args)
        return jax_work(affinities, *args[:-1])

    return build


def _jnp(x, w, b, k):
    import jax
    import jax.numpy as jnp

    values, index = jax.lax.top_k(x @ w + b, k)
    rows = jnp.arange(x.shape[0])[:, None]
    zeros = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
    return zeros.at[rows, index].set(jax.nn.softmax(values, axis=-1))


def _neuronjax(x, w, b, k):
    import neuronjax

    options = dict(act_fn="SOFTMAX", k=k, x_hbm_layout=1, router_pre_norm=False)
    return neuronjax.router_topk(x, w, b, **options)[2]


def _torch(case: Case) -> Work:
    import torch

    def affinities(x, w, b):
        logits = torch.addmm(b, x, w)
        values, index = torch.topk(logits, case["k"], dim=-1)
        weights = torch.softmax(values, dim=-1)
        return torch.zeros_like(logits).scatter(1, index, weights)

    inputs = list(map(torch.from_numpy, _inputs(case)))
    backward = case["mode"] == "backward"
    return torch_work(affinities, inputs, backward=backward)


WORKLOAD = Workload(
    name="router",
    title="Router",
    cases=CASES,
    sides={
        "torch": Side(_torch, "torch"),
        "jnp": Side(_jax_side(_jnp)),
        "neuronjax": Side(_jax_side(_neuronjax)),
    },
    ideal=ideal,
    # "No slower" leaves the rounds' own spread, five in a hundred.
    targets=(Target("neuronjax", "*", "ms", 1.05, "jnp"),),
)
