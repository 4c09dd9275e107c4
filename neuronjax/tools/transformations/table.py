"""The transformation table: every macro NAME x every transformation.

A macro joins it by registering; a refusal is declared with its family. Each cell
compares the macro with its plain reference under the same transformation.
"""

from collections.abc import Callable

from neuronjax.primitives.table import DERIVATIVES
from neuronjax.tools.transformations import (
    dtypes,
    exported,
    mapped,
    rules,
    sharded,
    values,
)
from neuronjax.tools.transformations.case import MacroCase
from neuronjax.tools.transformations.compare import Red

CELLS: dict[str, Callable[[MacroCase], None]] = {
    "jit": values.jitted,
    "plain()": values.in_plain_mode,
    "grad": values.grad,
    "jvp": values.jvp,
    "hvp": values.hvp,
    "grad of grad": values.grad_of_grad,
    "vmap (0, 0, ..)": mapped.all_first,
    "vmap (0, None, ..)": mapped.first_operand,
    "vmap (None, 0, ..)": mapped.but_first_operand,
    "vmap (1, 0, ..)": mapped.second_axis,
    "vmap of size 1": mapped.size_one,
    "vmap of vmap": mapped.twice,
    "vmap of grad": mapped.of_grad,
    "grad of vmap": mapped.grad_of,
    "scan": values.scan,
    "remat": values.remat,
    **{f"shard_map over {n}": sharded.manual(n) for n in (1, 2, 3, 5, 8)},
    "explicit sharding": sharded.explicit,
    "export inline": exported.inline,
    "export composite": exported.composite,
    "export, symbolic batch": exported.symbolic,
    "bfloat16": dtypes.bfloat16,
    "x64": dtypes.x64,
    "donation": values.donation,
}

# Beside the table: what holds for each NAME whatever its family declares.
RULES: dict[str, Callable[[MacroCase], None]] = {
    "one structure": rules.one_structure,
    "integer tangents": rules.integer_tangents,
    "jacobian": rules.jacobian,
}


# What a macro has none of whose operands is a float.
INTEGERS = "its operands are integers, nothing is differentiated"
OF_FLOATS = (*DERIVATIVES, "jacobian")


def run_cell(label: str, transformation: str) -> str | None:
    """Runs one cell; one that its family refuses must refuse.

    Args:
        label: a NAME, or the label of a variant.
        transformation: a key of `CELLS` or `RULES`.

    Returns:
        `None` if it is green, or the declared reason of the refusal.

    Raises:
        Exception: whatever makes it red; `Red` where a comparison fails, or where a
            declared refusal does not refuse.
    """
    case = MacroCase(label)
    reason = case.family.refuses.get(transformation)
    check = {**CELLS, **RULES}[transformation]
    if reason is None and not case.floats and transformation in OF_FLOATS:
        return INTEGERS
    if reason is None:
        check(case)
        return None
    try:
        check(case)
    except (NotImplementedError, ValueError, TypeError):
        return reason
    raise Red(f"expected a refusal, it is declared: {reason}")
