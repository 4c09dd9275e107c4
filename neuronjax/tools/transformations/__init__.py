"""The transformation table, as a user and the tests run it."""

from neuronjax.tools.transformations.check import (
    check_transformations as check_transformations,
)
from neuronjax.tools.transformations.report import Cell as Cell
from neuronjax.tools.transformations.report import State as State
from neuronjax.tools.transformations.report import (
    TransformationReport as TransformationReport,
)
from neuronjax.tools.transformations.table import CELLS as CELLS
from neuronjax.tools.transformations.table import RULES as RULES
from neuronjax.tools.transformations.table import run_cell as run_cell
