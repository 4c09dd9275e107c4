"""A linear layer with everything around it."""

from neuronjax.primitives.fused_linear.functions import fused_linear as fused_linear
from neuronjax.primitives.fused_linear.functions import (
    fused_linear_kernel as fused_linear_kernel,
)
