"""Functions, layers and models as files of StableHLO."""

from neuronjax.tools.export.exporting import export as export
from neuronjax.tools.export.program import ExportedModule as ExportedModule
from neuronjax.tools.export.program import ExportedProgram as ExportedProgram
