"""A product whose rows 8 host devices share: gathered before it, or scattered after it.

`gather`: rows of `x [m, K]` and columns of `w [K, N]` are split, the result by columns.
`scatter`, the mirror: columns of `x` and rows of `w` are split, the result by rows.
"""

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
)

DEVICES = 8
CASES = {
    f"{op}_{mode}_{dtype}": {
        "m": 2048,
        "K": 1024,
        "N": 1024,
        "op": op,
        "mode": mode,
        "dtype": dtype,
    }
    for dtype in ("float32", "bfloat16")
    for op in ("gather", "scatter")
    for mode in ("forward", "backward")
}


def ideal(case: Case) -> dict[str, float]:
    """One product forward, two more backward; each array once."""
    m, k, n = case["m"], case["K"], case["N"]
    passes = 3 if case["mode"] == "backward" else 1
    size = 2 if case["dtype"] == "bfloat16" else 4
    arrays = m * k + k * n + m * n
    return {"flops": 2.0 * m * k * n * passes, "bytes": float(size * arrays * passes)}


def _side(local: Callable) -> Side:
    """A function of the case that gives a function of one device's parts."""

    def mapped(case: Case, mesh: Any) -> Callable:
        import jax

        specs = _specs(case)
        options = dict(in_specs=specs[:2], out_specs=specs[2])
        return jax.shard_map(local(case), mesh=mesh, **options)

    return Side(_build(mapped), devices=DEVICES)


def _specs(case: Case) -> tuple[Any, Any, Any]:
    from jax.sharding import PartitionSpec as P

    rows, columns = P("tensor"), P(None, "tensor")
    if case["op"] == "gather":
        return rows, columns, columns
    return columns, rows, rows


def _build(function: Callable) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding

        from neuronjax.sharding import make_mesh

        mesh = make_mesh(tensor=DEVICES)
        rng = np.random.default_rng(0)
        m, k, n = case["m"], case["K"], case["N"]
        x, w, cotangent = (
            rng.standard_normal(shape, dtype=np.float32) * np.float32(gain)
            for shape, gain in (((m, k), 1), ((k, n), k**-0.5), ((m, n), 1))
        )
        args = [
            jax.device_put(a.astype(case["dtype"]), NamedSharding(mesh, spec))
            for a, spec in zip((x, w, cotangent), _specs(case), strict=True)
        ]
        f = function(case, mesh)
        if case["mode"] == "forward":
            return jax_work(f, *args[:2])
        return jax_forward_backward(f, *args)

    return build


def _collective(case: Case) -> Callable:
    """JAX's own collective beside a product."""
    import jax.numpy as jnp
    from jax import lax

    def gather(x, w):
        return _product(lax.all_gather(x, "tensor", tiled=True), w).astype(x.dtype)

    def scatter(x, w):
        out = lax.psum_scatter(_product(x, w), "tensor", tiled=True)
        return jnp.astype(out, x.dtype)

    return gather if case["op"] == "gather" else scatter


def _product(x, w):
    import jax.numpy as jnp

    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _compiler(case: Case, mesh: Any) -> Callable:
    """The product alone: XLA's partitioner adds what it needs."""
    from jax import lax
    from jax.sharding import NamedSharding

    def product(x, w):
        out = NamedSharding(mesh, _specs(case)[2])
        return lax.with_sharding_constraint(_product(x, w).astype(x.dtype), out)

    return product


def _ring(**options: Any) -> Callable[[Case], Callable]:
    """The public function of the case, inside `shard_map`."""

    def local(case: Case) -> Callable:
        import neuronjax

        gather = case["op"] == "gather"
        function = (
            neuronjax.allgather_compute_matmul
            if gather
            else neuronjax.matmul_reduce_scatter
        )
        return lambda x, w: function(x, w, DEVICES, 1, **options)

    return local


WORKLOAD = Workload(
    name="ring",
    title="Product over 8 devices",
    cases=CASES,
    sides={
        "collective": _side(_collective),
        "compiler": Side(_build(_compiler), devices=DEVICES),
        "ring": _side(_ring()),
        "ring_both_ways": _side(_ring(bidirectional=True)),
    },
    ideal=ideal,
    targets=(
        Target("ring", "gather_forward_float32", "ms", 1.1, "collective"),
        Target("ring", "gather_forward_float32", "run_mb", 0.4, "collective"),
    ),
)
