"""One greedy decode step of a Llama of 135M parameters over ranks and their cores.

The model and its cases are those of `decode_step`, and so is `llama`, which runs on one
device. Batch 1: 1000 / ms is the number of tokens a second. The devices are parts of
one host, which share its cores: what is measured is what dividing the step costs.
"""

from benchmarks.decode_step import CASES, ideal, neuronjax_step, transformer_tkg_step
from benchmarks.workload import Side, Workload

MESHES = ((1, 1), (1, 2), (3, 1), (3, 2))

WORKLOAD = Workload(
    name="mesh_decode",
    title="Decode step of a 135M Llama over a mesh",
    cases=CASES,
    sides={
        "llama": Side(neuronjax_step(scan=True)),
        **{
            f"tensor{tensor}_lnc{lnc}": Side(
                transformer_tkg_step(scan=True, tensor=tensor, lnc=lnc),
                devices=tensor * lnc,
            )
            for tensor, lnc in MESHES
        },
    },
    ideal=ideal,
    targets=(),
)
