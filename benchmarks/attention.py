"""Causal attention over a whole sequence, forward and forward + backward.

Each side gets its inputs in the layout that it documents; outputs are compared as
`[batch, seq, num_heads, head_dim]`.
"""

import math
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
    f"{mode}_{seq}_{dtype}": {
        "batch": 1,
        "num_heads": 8,
        "head_dim": 64,
        "seq": seq,
        "dtype": dtype,
        "mode": mode,
    }
    for dtype in ("float32", "bfloat16")
    for mode in ("forward", "backward")
    for seq in (2048, 4096, 8192)
}


def ideal(case: Case) -> dict[str, float]:
    """Half of the scores, two products forward, five more backward."""
    rows = case["batch"] * case["num_heads"] * case["seq"]
    product = 2.0 * rows * case["seq"] * case["head_dim"] / 2
    backward = case["mode"] == "backward"
    size = 2 if case["dtype"] == "bfloat16" else 4
    return {
        "flops": product * (7 if backward else 2),
        "bytes": float(rows * case["head_dim"] * size * (8 if backward else 4)),
    }


def _inputs(case: Case) -> list[Any]:
    """`q, k, v` and the cotangent, `[batch, seq, num_heads, head_dim]`, float32."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (case["batch"], case["seq"], case["num_heads"], case["head_dim"])
    return [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]


def _jax_work(case: Case, f: Callable, args: list, **options: Any) -> Work:
    if case["mode"] == "backward":
        return jax_forward_backward(f, *args, **options)
    return jax_work(f, *args[:-1], **options)


def _seq_major(attention: Callable[[Any, Any, Any], Any]) -> Callable[[Case], Work]:
    """A JAX function of `[batch, seq, num_heads, head_dim]` arrays."""

    def build(case: Case) -> Work:
        import jax.numpy as jnp

        args = [jnp.asarray(x, case["dtype"]) for x in _inputs(case)]
        return _jax_work(case, attention, args)

    return build


def _jax_nn(q, k, v):
    import jax

    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _flax(q, k, v):
    from flax import nnx

    return nnx.dot_product_attention(q, k, v, is_causal=True)


def _tokamax(implementation: str) -> Callable[[Any, Any, Any], Any]:
    def attention(q, k, v):
        import tokamax

        return tokamax.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )

    return attention


def _jnp(q, k, v):
    """The equation, with float32 scores and softmax."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    keep = jnp.tri(q.shape[1], dtype=bool)
    scores = jnp.where(keep, scores / math.sqrt(q.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def _torch(backend: str) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        dtype = getattr(torch, case["dtype"])
        inputs = [
            torch.from_numpy(x).transpose(1, 2).contiguous().to(dtype)
            for x in _inputs(case)
        ]

        def attention(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        return torch_work(
            attention,
            inputs,
            backward=case["mode"] == "backward",
            outputs=lambda out: [
                x.transpose(1, 2) for x in (out if isinstance(out, tuple) else (out,))
            ],
        )

    return build


def _neuronjax(devices: int) -> Callable[[Case], Work]:
    """`attention_cte`: heads in the leading axis, keys `[heads, head_dim, seq]`."""

    def build(case: Case) -> Work:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import neuronjax

        rows = (-1, case["seq"], case["head_dim"])
        args = [x.swapaxes(1, 2).reshape(rows) for x in _inputs(case)]
        args[1] = np.ascontiguousarray(args[1].swapaxes(1, 2))
        args = [jnp.asarray(x, case["dtype"]) for x in args]

        def attention(q, k, v):
            return neuronjax.attention_cte(q, k, v, scale=case["head_dim"] ** -0.5)

        if devices > 1:
            mesh = jax.make_mesh((devices,), ("tensor",))
            heads = PartitionSpec("tensor")
            args = [jax.device_put(x, NamedSharding(mesh, heads)) for x in args]
            attention = jax.shard_map(
                attention, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads
            )
        return _jax_work(case, attention, args, outputs=lambda out: _shared(case, out))

    return build


def _shared(case: Case, out: Any) -> list:
    """`neuronjax` outputs as `[batch, seq, num_heads, head_dim]`."""
    import numpy as np

    heads_major = [np.asarray(x) for x in (out if isinstance(out, tuple) else (out,))]
    if len(heads_major) == 4:
        heads_major[2] = heads_major[2].swapaxes(1, 2)
    rows = (case["batch"], case["num_heads"], case["seq"], case["head_dim"])
    return [x.reshape(rows).swapaxes(1, 2) for x in heads_major]


def _too_large(case: Case) -> str:
    """The sides that keep S x S arrays need 13 GB and more for this one."""
    large = case["seq"] >= 8192 and case["mode"] == "backward"
    return "keeps S x S arrays: over 12 GB" if large else ""


def _torch_math_skip(case: Case) -> str:
    return _too_large(case) or slow_bfloat16(case)


WORKLOAD = Workload(
    name="attention",
    title="Causal attention",
    cases=CASES,
    sides={
        "torch_flash": Side(_torch("FLASH_ATTENTION"), "torch", skip=slow_bfloat16),
        "jax_nn": Side(_seq_major(_jax_nn), skip=_too_large),
        "flax": Side(_seq_major(_flax), skip=_too_large),
        "jnp": Side(_seq_major(_jnp), skip=_too_large),
        "tokamax_chunked": Side(
            _seq_major(_tokamax("xla_chunked")), "peers", skip=_too_large
        ),
        "torch_math": Side(_torch("MATH"), "torch", skip=_torch_math_skip),
        "neuronjax": Side(_neuronjax(1)),
        "neuronjax_2dev": Side(_neuronjax(2), devices=2),
    },
    ideal=ideal,
    targets=(
        Target("neuronjax", "forward_2048_float32", "ms", 0.35, "jax_nn"),
        Target("neuronjax", "forward_2048_float32", "ms", 1.5, "torch_flash"),
        Target("neuronjax_2dev", "forward_2048_float32", "ms", 0.9, "torch_flash"),
        Target("neuronjax", "backward_4096_float32", "ms", 0.2, "jax_nn"),
        Target("neuronjax", "backward_4096_float32", "run_mb", 0.07, "jax_nn"),
        Target("neuronjax", "backward_4096_float32", "ms", 1.3, "torch_flash"),
    ),
)
