"""The loss over a large vocabulary: public functions, macros, and their rules."""

from neuronjax.primitives.cross_entropy.functions import cross_entropy as cross_entropy
from neuronjax.primitives.cross_entropy.functions import (
    linear_cross_entropy as linear_cross_entropy,
)
from neuronjax.primitives.cross_entropy.peers import (
    cross_entropy_backward as cross_entropy_backward,
)
from neuronjax.primitives.cross_entropy.peers import (
    cross_entropy_forward as cross_entropy_forward,
)
