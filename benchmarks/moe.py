"""Experts of a SwiGLU mixture: 4096 pairs of a token and an expert, d_model 512.

Which experts a token goes to, and its gates, are inputs: no router is timed. Sorting
the pairs by expert is, on every side. `drawn` routings differ in how popular experts
are; in `one` all tokens go to one expert.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Target,
    Work,
    Workload,
    jax_work,
    slow_bfloat16,
    torch_work,
)

# The spread of the experts' logits beside the spread 1 of each token's own.
POPULARITY = {"balanced": 0.0, "mild": 0.5, "skewed": 2.0}
# Each has 4096 pairs, so that the same time is wanted of each.
ROUTINGS = {name: dict(tokens=2048, k=2) for name in POPULARITY}
ROUTINGS["one"] = dict(tokens=4096, k=1)
CASES = {
    f"{mode}_E{experts}_{routing}_{dtype}": {
        **sizes,
        "d_model": 512,
        "d_ff": 1024,
        "num_experts": experts,
        "routing": routing,
        "mode": mode,
        "dtype": dtype,
    }
    for dtype in ("float32", "bfloat16")
    for experts in (8, 64)
    for mode in ("forward", "backward")
    for routing, sizes in ROUTINGS.items()
    if dtype == "float32" or routing == "mild"
}


def ideal(case: Case) -> dict[str, float]:
    """Three products of every pair forward, six more backward; each weight once."""
    passes = 3 if case["mode"] == "backward" else 1
    size = 2 if case["dtype"] == "bfloat16" else 4
    used = 1 if case["routing"] == "one" else case["num_experts"]
    weights = 3 * case["d_model"] * case["d_ff"]
    activations = 2 * case["tokens"] * case["d_model"]
    return {
        "flops": 2.0 * case["tokens"] * case["k"] * weights * passes,
        "bytes": float(size * passes * (used * weights + activations)),
    }


def _routing(case: Case, rng: Any) -> tuple[Any, Any]:
    """Experts of each token, `[tokens, k]` int32, and their softmax gates."""
    import numpy as np

    if case["routing"] == "one":
        shape = (case["tokens"], 1)
        return np.zeros(shape, np.int32), np.ones(shape, np.float32)
    tokens, experts = case["tokens"], case["num_experts"]
    logits = rng.standard_normal((tokens, experts), dtype=np.float32)
    popularity = rng.standard_normal((1, experts), dtype=np.float32)
    logits += np.float32(POPULARITY[case["routing"]]) * popularity
    index = np.argsort(-logits, axis=1)[:, : case["k"]].astype(np.int32)
    gates = np.exp(np.take_along_axis(logits, index, axis=1))
    return index, gates / gates.sum(axis=1, keepdims=True)


def _inputs(case: Case) -> tuple[Any, list[Any]]:
    """The experts, and float32: tokens, gates, three weights, the cotangent."""
    import numpy as np

    rng = np.random.default_rng(0)
    index, gates = _routing(case, rng)
    tokens, experts = case["tokens"], case["num_experts"]
    d_model, d_ff = case["d_model"], case["d_ff"]
    wide, narrow = (experts, d_model, d_ff), (experts, d_ff, d_model)
    shapes = (tokens, d_model), wide, wide, narrow, (tokens, d_model)
    x, gate, up, down, cotangent = (
        rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)
        for shape, gain in zip(shapes, (1, 0.04, 0.04, 0.03, 1), strict=True)
    )
    return index, [x, gates, gate, up, down, cotangent]


def _jax_work(
    case: Case, f: Callable, index: Any, args: Sequence[Any], **options: Any
) -> Work:
    """The choices are an operand too: XLA would sort constants while it compiles."""
    import jax
    import jax.numpy as jnp

    *operands, cotangent = (jnp.asarray(x, case["dtype"]) for x in args)
    if case["mode"] == "forward":
        return jax_work(f, jnp.asarray(index), *operands, **options)

    def both(index, cotangent, *operands):
        out, pull = jax.vjp(lambda *given: f(index, *given), *operands)
        return out, *pull(cotangent)

    return jax_work(both, jnp.asarray(index), cotangent, *operands, **options)


def _jax_side(experts: Callable) -> Callable[[Case], Work]:
    """A function of the choices, the tokens, the gates and three separate weights."""
    return lambda case: _jax_work(case, experts, *_inputs(case))


def _dense(index, x, gates, gate, up, down):
    """Every expert on every token."""
    import jax
    import jax.numpy as jnp

    hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, gate))
    hidden *= jnp.einsum("td,edf->etf", x, up)
    out = jnp.einsum("etf,efd->etd", hidden, down)
    return jnp.einsum("etd,te->td", out, _spread(index, gates, gate.shape[0]))


def _spread(index, gates, experts):
    """`[tokens, experts]`: the gate where the token goes, 0 elsewhere."""
    import jax.numpy as jnp

    tokens = jnp.arange(index.shape[0])[:, None]
    zeros = jnp.zeros((index.shape[0], experts), gates.dtype)
    return zeros.at[tokens, index].add(gates)


def _ragged_dot(index, x, gates, gate, up, down):
    """Pairs sorted by expert, three products of groups of rows."""
    import jax
    import jax.numpy as jnp
    from jax.lax import ragged_dot

    flat = index.reshape(-1)
    order = jnp.argsort(flat)
    token = order // index.shape[1]
    counts = jnp.bincount(flat, length=gate.shape[0]).astype(jnp.int32)
    rows = x[token]
    hidden = jax.nn.silu(ragged_dot(rows, gate, counts))
    hidden *= ragged_dot(rows, up, counts)
    out = ragged_dot(hidden, down, counts) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[token].add(out)


def _torch(case: Case) -> Work:
    """A loop over experts, each with its own parameters, as modules have them.

    Out of one stacked parameter, each expert's slice would cost the backward a gradient
    of the whole.
    """
    import torch
    from torch.nn.functional import one_hot, silu

    index, (x, gates, *weights, cotangent) = _inputs(case)
    dtype, experts = getattr(torch, case["dtype"]), case["num_experts"]
    chosen = torch.from_numpy(index).long()
    apart = [w for stacked in weights for w in stacked]
    inputs = [torch.tensor(a, dtype=dtype) for a in (x, gates, *apart, cotangent)]

    def block(x, gates, *apart):
        gate, up, down = (apart[i * experts : (i + 1) * experts] for i in range(3))
        out = torch.zeros_like(x)
        mask = one_hot(chosen, experts).permute(2, 1, 0)
        for expert in range(experts):
            which, token = torch.where(mask[expert])
            if token.numel():
                rows = x[token]
                hidden = silu(rows @ gate[expert]) * (rows @ up[expert])
                share = (hidden @ down[expert]) * gates[token, which, None]
                out = out.index_add(0, token, share)
        return out

    def outputs(out):
        if not isinstance(out, tuple):
            return [out]
        grads = [
            torch.zeros_like(like) if grad is None else grad
            for grad, like in zip(out[3:], inputs[2:-1], strict=True)
        ]
        parts = (grads[i * experts : (i + 1) * experts] for i in range(3))
        return [*out[:3], *map(torch.stack, parts)]

    return torch_work(
        block, inputs, backward=case["mode"] == "backward", outputs=outputs
    )


def _neuronjax(block_size: int, checkpoint: str = "store") -> Callable[[Case], Work]:
    """`moe_cte` on blocks of `block_size` pairs; gate and up are one weight."""

    def build(case: Case) -> Work:
        import numpy as np

        import neuronjax

        index, (x, gates, gate, up, down, cotangent) = _inputs(case)
        spec = neuronjax.MoECTESpec("shard_on_block")

        def experts(index, x, gates, gate_up, down):
            blocks = neuronjax.route_to_blocks(
                index, case["num_experts"], block_size, skip_token=True
            )
            return neuronjax.moe_cte(
                x,
                _spread(index, gates, case["num_experts"]).reshape(-1, 1),
                gate_up,
                down,
                blocks.token_position_to_id,
                blocks.block_to_expert,
                block_size,
                spec,
                skip_dma=neuronjax.SkipMode(skip_token=True),
                checkpoint=checkpoint,
            )

        args = [x, gates, np.stack([gate, up], axis=2), down, cotangent]
        return _jax_work(case, experts, index, args, outputs=_gate_and_up)

    return build


def _gate_and_up(out: Any) -> list:
    """The gradients of gate and of up, apart."""
    if not isinstance(out, tuple):
        return [out]
    *front, gate_up, down = out
    return [*front, gate_up[:, :, 0], gate_up[:, :, 1], down]


def _dense_skip(case: Case) -> str:
    large = case["num_experts"] >= 64 and case["mode"] == "backward"
    return "keeps experts x tokens x d_ff arrays: over 3 GB" if large else ""


def _ragged_skip(case: Case) -> str:
    """On processors it multiplies every expert with every pair."""
    return "over 20 times the time of torch" if case["num_experts"] >= 64 else ""


def _forward_skip(case: Case) -> str:
    return "" if case["mode"] == "backward" else "stores nothing without a backward"


WORKLOAD = Workload(
    name="moe",
    title="Mixture of experts",
    cases=CASES,
    sides={
        "torch": Side(_torch, "torch", skip=slow_bfloat16),
        "dense": Side(_jax_side(_dense), skip=_dense_skip),
        "ragged_dot": Side(_jax_side(_ragged_dot), skip=_ragged_skip),
        "neuronjax_128": Side(_neuronjax(128)),
        "neuronjax_32": Side(_neuronjax(32)),
        "neuronjax_128_recompute": Side(
            _neuronjax(128, "recompute"), skip=_forward_skip
        ),
        "neuronjax_32_recompute": Side(_neuronjax(32, "recompute"), skip=_forward_skip),
    },
    ideal=ideal,
    targets=(
        Target("neuronjax_128", "forward_E8_mild_float32", "ms", 1.0, "torch"),
        Target("neuronjax_128", "forward_E8_mild_float32", "ms", 0.15, "ragged_dot"),
        Target("neuronjax_32", "forward_E64_mild_float32", "ms", 0.8, "torch"),
        Target("neuronjax_128", "backward_E8_mild_float32", "ms", 1.15, "torch"),
        Target("neuronjax_128", "backward_E8_mild_float32", "run_mb", 1.4, "torch"),
        Target("neuronjax_32", "backward_E64_mild_float32", "ms", 1.4, "torch"),
        Target("neuronjax_32", "backward_E64_mild_float32", "run_mb", 1.4, "torch"),
    ),
)
