"""The output projection: public functions, the macro, and the rules of its calls."""

from neuronjax.primitives.output_projection.functions import (
    output_projection_cte as output_projection_cte,
)
from neuronjax.primitives.output_projection.functions import (
    output_projection_tkg as output_projection_tkg,
)
