"""The NAMEs of the transformation table, and how the tests compare arrays."""

from neuronjax.primitives import registry
from neuronjax.tools.transformations.case import MacroCase as MacroCase
from neuronjax.tools.transformations.compare import error as error
from neuronjax.tools.transformations.compare import grads as grads
from neuronjax.tools.transformations.compare import is_float as is_float
from neuronjax.tools.transformations.compare import loss as loss
from neuronjax.tools.transformations.compare import require_close as assert_close

__all__ = ["NAMES", "MacroCase", "assert_close", "error", "grads", "is_float", "loss"]

NAMES = registry.examples()
