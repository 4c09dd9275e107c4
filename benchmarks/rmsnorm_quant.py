"""RMSNorm and fp8 codes with a scale for each row, 4096 rows of 4096."""

from collections.abc import Callable
from typing import Any

from benchmarks.workload import Case, Side, Target, Work, Workload, jax_work

CASES = {"T4096_H4096": {"tokens": 4096, "d_model": 4096}}
EPS = 1e-6


def ideal(case: Case) -> dict[str, float]:
    """One reading of float32, one writing of bytes; some eight operations each."""
    size = float(case["tokens"] * case["d_model"])
    return {"flops": 8 * size, "bytes": 5 * size}


def _inputs(case: Case) -> list[Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((case["tokens"], case["d_model"]), dtype=np.float32)
    return [rows, rng.standard_normal(case["d_model"], dtype=np.float32)]


def _dequantized(outs: Any) -> list:
    """The values that codes and scales stand for: the sides end at 240 or at 448."""
    codes, scale = outs
    if hasattr(codes, "detach"):
        return [codes.float() * scale]
    return [codes.astype(scale.dtype) * scale]


def _jax_side(f: Callable) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax.numpy as jnp

        return jax_work(f, *map(jnp.asarray, _inputs(case)), outputs=_dequantized)

    return build


def _jnp(x, gain):
    import jax.numpy as jnp
    from jax import lax

    y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * gain
    scale = jnp.abs(y).max(-1, keepdims=True) / 448.0
    return (y / scale).astype(jnp.float8_e4m3fn), scale


def _neuronjax(x, gain):
    import neuronjax

    return neuronjax.rmsnorm_quant(x, gain, packed=False)


def _packed(case: Case) -> Work:
    """The rows as the chip's kernel returns them, scales at their ends."""
    import jax.numpy as jnp

    import neuronjax

    def outputs(packed):
        return _dequantized(neuronjax.unpack_rows(packed))

    arrays = map(jnp.asarray, _inputs(case))
    return jax_work(neuronjax.rmsnorm_quant, *arrays, outputs=outputs)


def _torch(case: Case) -> Work:
    import torch

    x, gain = map(torch.from_numpy, _inputs(case))

    def run():
        with torch.no_grad():
            y = torch.nn.functional.rms_norm(x, (case["d_model"],), gain, EPS)
            scale = y.abs().amax(-1, keepdim=True) / 448.0
            return (y / scale).to(torch.float8_e4m3fn), scale

    return Work(run, _dequantized)


WORKLOAD = Workload(
    name="rmsnorm_quant",
    title="RMSNorm with fp8 rows",
    cases=CASES,
    sides={
        "torch": Side(_torch, "torch"),
        "jnp": Side(_jax_side(_jnp)),
        "neuronjax": Side(_jax_side(_neuronjax)),
        "neuronjax_packed": Side(_packed),
    },
    ideal=ideal,
    targets=(Target("neuronjax", "*", "ms", 0.12, "torch"),),
)
