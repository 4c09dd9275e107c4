"""What the rules of the collectives read of a call."""

import math
from types import SimpleNamespace
from typing import Any

from neuronjax.primitives.collectives.mapped import is_checked
from neuronjax.primitives.collectives.plan import RingPlan, planned
from neuronjax.primitives.mesh_axes import LNC, bound_size
from neuronjax.primitives.options import FLOATS
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

GATHER_MATMUL, MATMUL_SCATTER = "allgather_compute_matmul", "matmul_reduce_scatter"
ROW_GATHER, ROW_SCATTER = "fine_grained_allgather", "fine_grained_reduce_scatter"
COLUMN_GATHER, TILED_COLUMN_GATHER = "allgather_sb2sb", "allgather_sb2sb_tiled"
RINGS = (GATHER_MATMUL, MATMUL_SCATTER, ROW_GATHER, ROW_SCATTER)
SB2SB = (COLUMN_GATHER, TILED_COLUMN_GATHER)
GATHER_MATMUL_KERNEL = "collective_matmul_kernel"
MATMUL_SCATTER_KERNEL = "matmul_reduce_scatter_kernel"
ROW_GATHER_KERNEL = "fine_grained_all_gather_kernel"
ROW_SCATTER_KERNEL = "fine_grained_reduce_scatter_kernel"
SB2SB_KERNEL = "sb2sb_all_gather_kernel"
RING_KERNELS = (
    GATHER_MATMUL_KERNEL,
    MATMUL_SCATTER_KERNEL,
    ROW_GATHER_KERNEL,
    ROW_SCATTER_KERNEL,
)
KERNELS = (*RING_KERNELS, SB2SB_KERNEL)
SCATTERS = (MATMUL_SCATTER, ROW_SCATTER, MATMUL_SCATTER_KERNEL, ROW_SCATTER_KERNEL)
PRODUCTS = (GATHER_MATMUL, MATMUL_SCATTER, GATHER_MATMUL_KERNEL, MATMUL_SCATTER_KERNEL)
# Those that add: a copy takes any dtype.
SUMS = (*PRODUCTS, ROW_SCATTER, ROW_SCATTER_KERNEL)
OPERANDS = ("lhs", "rhs", "inp")


def operands_of(call: SimpleNamespace) -> dict[str, Any]:
    """The operands of a call by name."""
    return {name: getattr(call, name) for name in OPERANDS if hasattr(call, name)}


def tiles(call: SimpleNamespace) -> bool:
    """Whether an operand is a tile."""
    return any(isinstance(x, MemrefTile) for x in operands_of(call).values())


def misranked(call: SimpleNamespace) -> str:
    """The operands that are no matrices, described."""
    rows = "tp_degree * m" if call.function in SCATTERS else "m"
    rows = rows.replace("tp_degree", "ranks") if call.function in KERNELS else rows
    words = dict(lhs=f"[{rows}, K]", rhs="[K, N]", inp="[H, W]")
    wrong = [
        f"{name} must have shape {words[name]}, got {_shape(x)}"
        for name, x in operands_of(call).items()
        if len(_shape(x)) != 2
    ]
    return "" if tiles(call) else "; ".join(wrong)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def odd_dtype(call: SimpleNamespace) -> str:
    """The operands that cannot be added, described."""
    found = {name: getattr(x, "dtype", None) for name, x in operands_of(call).items()}
    wrong = [f"{name} of {dtype}" for name, dtype in found.items()]
    allowed = [dtype in FLOATS for dtype in found.values()]
    return ", ".join(w for w, fine in zip(wrong, allowed, strict=True) if not fine)


def _axis_facts(call: SimpleNamespace, devices: int) -> dict[str, Any]:
    """What is known of the mesh axes that a call names."""
    found, lnc_axis = bound_size(call.axis), getattr(call, "lnc_axis", None)
    return dict(
        devices=devices,
        misfits=found != devices and (devices > 1 or found is not None),
        seen=", not bound" if found is None else f" of {found}",
        lnc_fault="" if lnc_axis is None else _lnc_fault(call),
    )


def _lnc_fault(call: SimpleNamespace) -> str:
    """Why a rank's cores cannot exchange; unchecked, gradients would be halved."""
    if bound_size(call.lnc_axis) is None:
        return ", not bound"
    exchanges = not getattr(call, "raw", False)
    return ", unchecked" if exchanges and not is_checked(call.lnc_axis) else ""


def ring_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules of the functions over a ring read."""
    ranks, groups = int(call.tp_degree), int(call.num_groups)
    plan = plan_of(call)
    return dict(
        plan=plan,
        m=call.lhs.shape[0],
        shares=plan.cores * plan.channels * (ranks if scatters(call) else 1),
        **_axis_facts(call, ranks * groups),
        **_contracted_sizes(call),
    )


def plan_of(call: SimpleNamespace) -> RingPlan:
    """The plan of a call; a rank that names its cores has two where none are bound."""
    cores = 1 if call.lnc_axis is None else bound_size(call.lnc_axis) or LNC
    return planned(
        call.lhs,
        getattr(call, "rhs", None),
        int(call.tp_degree),
        cores,
        force_hbm_cc=bool(call.force_hbm_cc),
        nc_version=int(call.nc_version),
        scatters=scatters(call),
    )


def scatters(call: SimpleNamespace) -> bool:
    """Whether a call leaves each rank its own rows of a sum over ranks."""
    return call.function in SCATTERS


def _contracted_sizes(call: SimpleNamespace) -> dict[str, Any]:
    rhs = getattr(call, "rhs", None)
    if rhs is None:
        return {}
    return dict(lhs_shape=tuple(call.lhs.shape), rhs_shape=tuple(rhs.shape))


def columns_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules of the gathers along columns read."""
    groups = call.replica_groups
    lnc_axis = getattr(call, "lnc_axis", None)
    rows = call.inp.shape[0]
    return _axis_facts(call, sum(map(len, groups))) | dict(
        sizes=sorted({len(group) for group in groups}),
        rows=rows,
        cores=1 if lnc_axis is None else bound_size(lnc_axis) or LNC,
        tiles=math.ceil(rows / PARTITIONS),
    )


def kernel_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules of the emitters read."""
    size = 1 if call.axis is None else bound_size(call.axis)
    ranks = size if call.groups is None else len(call.groups[0])
    rows = next(iter(operands_of(call).values())).shape[0]
    parts = ranks if scatters(call) and ranks else 1
    return dict(
        found=size,
        m=rows,
        shares=parts * int(getattr(call, "channels", 1)),
        **_contracted_sizes(call),
    )
