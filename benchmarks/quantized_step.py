"""One decode step of a Llama of 135M parameters in each form of its weights.

The model is that of `decode_step`; the embedding stays as it is in every mode.
"""

from benchmarks.decode_step import CASES, ideal, neuronjax_step
from benchmarks.workload import Side, Workload

MODES = ("row-fp8", "static-fp8", "mxfp8", "mxfp4")


def _sides(*, scan: bool) -> dict[str, Side]:
    form = "scan" if scan else "list"
    sides = {
        f"{dtype} {form}": Side(neuronjax_step(scan=scan, dtype=dtype))
        for dtype in ("float32", "bfloat16")
    }
    modes = {f"{m} {form}": Side(neuronjax_step(scan=scan, mode=m)) for m in MODES}
    return sides | modes


WORKLOAD = Workload(
    name="quantized_step",
    title="Decode step of a 135M Llama by the form of its weights",
    cases=CASES,
    sides=_sides(scan=False) | _sides(scan=True),
    ideal=ideal,
    targets=(),
)
