"""Norms and reductions of any axes."""

from neuronjax.primitives.reduce.functions import layer_norm as layer_norm
from neuronjax.primitives.reduce.functions import reduce as reduce
from neuronjax.primitives.reduce.functions import rms_norm as rms_norm
from neuronjax.primitives.reduce.macro import (
    neuron_reduce_macro_kernel as neuron_reduce_macro_kernel,
)
from neuronjax.primitives.reduce.macro import reduce_family as reduce_family
from neuronjax.primitives.reduce.rules import is_radicand as is_radicand
from neuronjax.primitives.reduce.rules import traced as traced
