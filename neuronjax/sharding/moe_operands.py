"""How the operands and results of blockwise experts lie on cores that cooperate."""

from types import SimpleNamespace
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from neuronjax.primitives.contracts import FUNCTIONS, can
from neuronjax.sharding.mesh import require_axes

# The axis of each operand and result that is split, by what the cores divide; the
# others are whole on every core. Block-scaled weights have axes of their own.
DENSE: dict[str, dict[str, int]] = {
    "hidden": dict(
        hidden=1, gate_up_w=1, down_w=2, down_b=1, down_scale=2, d_out=1, out=1, down=2
    ),
    "intermediate": dict(
        gate_up_w=3, down_w=1, gate_up_b=2, gate_up_scale=3, gate_up=2
    ),
    # Operands are whole on every core, which computes the gradients of its columns.
    "columns": dict(hidden=1, gate_up_w=1),
}
BLOCK_SCALED = {
    "intermediate": dict(
        gate_up_w=4, down_w=2, gate_up_b=3, gate_up_scale=4, down_scale=2, gate_up=2
    )
}
# Gradients that are split otherwise than their operands.
COLUMN_GRADS = dict(down_w=2)


def lies(axes: dict[str, int], role: str, lnc: str) -> P:
    """The partition of one operand, result or gradient."""
    return P(*[None] * axes[role], lnc) if role in axes else P()


def call_of(
    sharded: str, function: str, mesh: Mesh, lnc: str, given: dict[str, Any]
) -> SimpleNamespace:
    """The call of `function` on one device, refused as `sharded` where it would be."""
    require_axes(sharded, mesh, lnc=lnc)
    for name in given.keys() - FUNCTIONS[function].signature.parameters.keys():
        raise TypeError(f"{sharded}() got an unexpected keyword argument {name!r}")
    report = can(function, **given)
    if not report:
        lines = [v.message for v in report.violations if v.tag == "math"]
        raise ValueError("\n".join(lines).replace(function, sharded))
    bound = FUNCTIONS[function].signature.bind(**given)
    bound.apply_defaults()
    return SimpleNamespace(function=function, **bound.arguments)


def require_multiple(
    sharded: str, mesh: Mesh, lnc: str, sizes: dict[str, tuple[int, int]]
) -> None:
    """Refuses a size that the cores cannot share; of each, in how large units."""
    count = mesh.shape[lnc]
    for name, (size, unit) in sizes.items():
        if size % (count * unit):
            each = f"{unit} times the" if unit > 1 else "the"
            raise ValueError(
                f"{sharded}: {name} must be a multiple of {each} {count} cores of "
                f"{lnc!r}, got {size}"
            )
