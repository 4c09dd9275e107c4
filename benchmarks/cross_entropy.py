"""The loss of a large vocabulary and its gradient, from logits or from their factors.

`logits`: the mean loss of logits that are there, and their gradient. `linear`: that of
`x w` with 512 features, and the gradients of both.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Target,
    Work,
    Workload,
    jax_work,
    slow_bfloat16,
)

D_MODEL = 512
SIZES = {"V32000": (2048, 32000), "V128256": (1024, 128256)}
CASES = {
    f"{kind}_{name}_{dtype}": {
        "tokens": tokens,
        "vocab": vocab,
        "kind": kind,
        "dtype": dtype,
    }
    for dtype in ("float32", "bfloat16")
    for kind in ("logits", "linear")
    for name, (tokens, vocab) in SIZES.items()
}


def ideal(case: Case) -> dict[str, float]:
    """Logits: read twice, their gradient written. Factors: three products."""
    logits = case["tokens"] * case["vocab"]
    size = 2 if case["dtype"] == "bfloat16" else 4
    if case["kind"] == "logits":
        return {"flops": 5.0 * logits, "bytes": 3.0 * size * logits}
    factors = (case["tokens"] + case["vocab"]) * D_MODEL
    return {"flops": 6.0 * logits * D_MODEL, "bytes": 3.0 * size * factors}


def _inputs(case: Case) -> tuple[list[Any], Any]:
    """The logits, or `x` and `w`; and the targets."""
    import numpy as np

    rng = np.random.default_rng(0)
    tokens, vocab = case["tokens"], case["vocab"]
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    if case["kind"] == "logits":
        return [rng.standard_normal((tokens, vocab), dtype=np.float32)], targets
    x = rng.standard_normal((tokens, D_MODEL), dtype=np.float32)
    w = rng.standard_normal((D_MODEL, vocab), dtype=np.float32) * np.float32(0.05)
    return [x, w], targets


def _jax_side(logits_loss: Callable, linear_loss: Callable) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax
        import jax.numpy as jnp

        operands, targets = _inputs(case)
        args = [jnp.asarray(x, case["dtype"]) for x in operands]
        loss = logits_loss if case["kind"] == "logits" else linear_loss
        grad = jax.value_and_grad(loss, tuple(range(len(args))))
        return jax_work(grad, *args, jnp.asarray(targets), outputs=_flat)

    return build


def _flat(out: Any) -> list:
    """The loss, then each gradient."""
    loss, grads = out
    return [loss, *grads]


def _optax(logits, targets):
    import jax.numpy as jnp
    import optax

    wide = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(wide, targets).mean()


def _optax_linear(x, w, targets):
    import jax.numpy as jnp

    return _optax(jnp.matmul(x, w, preferred_element_type=jnp.float32), targets)


def _neuronjax(logits, targets):
    import neuronjax

    return neuronjax.cross_entropy(logits, targets)


def _neuronjax_linear(block_size: int | None = None) -> Callable:
    def loss(x, w, targets):
        import neuronjax

        return neuronjax.linear_cross_entropy(x, w, targets, block_size=block_size)

    return loss


def _tokamax(x, w, targets):
    import tokamax

    return tokamax.linear_softmax_cross_entropy_loss(
        x, targets, w, reduction="mean", implementation="xla"
    )


def _torch(case: Case) -> Work:
    import torch
    from torch.nn.functional import cross_entropy

    operands, targets = _inputs(case)
    dtype = getattr(torch, case["dtype"])
    leaves = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in operands]
    labels = torch.from_numpy(targets).long()

    def both():
        for leaf in leaves:
            leaf.grad = None
        logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1]
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        return [loss, *(leaf.grad for leaf in leaves)]

    return Work(both)


def _linear_only(case: Case) -> str:
    return "" if case["kind"] == "linear" else "takes factors alone"


WORKLOAD = Workload(
    name="cross_entropy",
    title="Cross-entropy over a large vocabulary",
    cases=CASES,
    sides={
        "optax": Side(_jax_side(_optax, _optax_linear)),
        "torch": Side(_torch, "torch", skip=slow_bfloat16),
        "tokamax": Side(_jax_side(_optax, _tokamax), "peers", skip=_linear_only),
        "neuronjax": Side(_jax_side(_neuronjax, _neuronjax_linear())),
        "neuronjax_64": Side(
            _jax_side(_neuronjax, _neuronjax_linear(64)), skip=_linear_only
        ),
    },
    ideal=ideal,
    targets=(
        Target("neuronjax", "logits_*_float32", "ms", 1.05, "optax"),
        # 1.1 times the gradient itself.
        Target("neuronjax", "logits_V32000_float32", "run_mb", 275.0),
        Target("neuronjax", "logits_V128256_float32", "run_mb", 551.0),
        Target("neuronjax", "linear_*_float32", "ms", 1.02, "optax"),
        Target("neuronjax", "linear_V32000_float32", "run_mb", 0.35, "optax"),
        Target("neuronjax", "linear_V128256_float32", "run_mb", 0.5, "optax"),
    ),
)
