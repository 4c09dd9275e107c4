"""The transformation table, as a user and the tests run it."""

from neuronjax.tools.transformations.table import CELLS as CELLS
from neuronjax.tools.transformations.table import run_cell as run_cell
