"""Whether a function computes what its float64 reference computes."""

from neuronjax.tools.verify.comparison import Comparison as Comparison
from neuronjax.tools.verify.comparison import Worst as Worst
from neuronjax.tools.verify.report import Verification as Verification
from neuronjax.tools.verify.verification import verify as verify
