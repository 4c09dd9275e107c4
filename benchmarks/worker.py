"""One side in one process: builds, warms up, then gives one timed sample per request.

`python -m benchmarks.worker WORKLOAD SIDE CASE_JSON` speaks JSON lines on standard
output. Only the standard library and the side's own packages are imported.
"""

import ctypes
import gc
import importlib
import json
import math
import sys
import time
from typing import Any

from benchmarks.workload import Side, Work

MIN_SAMPLE_S = 0.05
MARK = "@@"


def _say(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def _status_mb(key: str) -> float:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024
    return 0.0


def _trim() -> None:
    """Gives freed pages back, so that the resident size is what is in use."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def _warm_up_runtime(interpreter: str) -> None:
    if interpreter == "torch":
        import torch

        torch.set_num_threads(2)
        torch.mm(torch.zeros(8, 8), torch.zeros(8, 8))
    else:
        import jax
        import jax.numpy as jnp

        jax.block_until_ready(jnp.zeros((8, 8)) @ jnp.zeros((8, 8)))


def _sampled(outputs: list) -> list[list[float]]:
    """Some hundred values of each output, to see that the sides agree."""
    import numpy as np

    samples = []
    for out in outputs:
        if hasattr(out, "detach"):
            out = out.detach().float().numpy()
        flat = np.asarray(out).astype(np.float32).reshape(-1)
        picks = np.linspace(0, flat.size - 1, min(flat.size, 257)).astype(int)
        samples.append([float(value) for value in flat[picks]])
    return samples


def _prepare(side: Side, case: dict[str, Any]) -> tuple[Work, dict[str, Any]]:
    _warm_up_runtime(side.interpreter)
    work = side.build(case)
    _trim()
    before_mb = _status_mb("VmRSS")
    _reset_peak()
    samples = _sampled(work.outputs(work.run()))
    _reset_peak()
    took = min(_seconds(work) for _ in range(2))
    inner = max(1, math.ceil(MIN_SAMPLE_S / max(took, 1e-6)))
    return work, {
        "inner": inner,
        "before_mb": before_mb,
        "samples": samples,
        **work.facts,
    }


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work.run()
    return time.perf_counter() - start


def _timed(work: Work, inner: int) -> dict[str, float]:
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(inner):
        work.run()
    wall = time.perf_counter() - start
    return {
        "ms": wall / inner * 1e3,
        "cpu_ms": (time.process_time() - cpu) / inner * 1e3,
    }


def main() -> None:
    workload, side_name, case_json = sys.argv[1:]
    sys.argv = sys.argv[:1]  # tokamax parses what is left with absl
    side = importlib.import_module(f"benchmarks.{workload}").WORKLOAD.sides[side_name]
    try:
        work, facts = _prepare(side, json.loads(case_json))
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {error}"[:400]})
        return
    _say(facts)
    for line in sys.stdin:
        if line.strip() != "go":
            break
        _say(_timed(work, facts["inner"]))
    # The arrays that a run leaves behind count: they are its output.
    _say({"run_mb": _status_mb("VmHWM") - facts["before_mb"]})


if __name__ == "__main__":
    main()
