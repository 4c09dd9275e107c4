"""Index lists: public functions, and the rules of their calls."""

from neuronjax.primitives.indices.functions import (
    dynamic_elementwise_add as dynamic_elementwise_add,
)
from neuronjax.primitives.indices.functions import (
    find_nonzero_indices as find_nonzero_indices,
)
from neuronjax.primitives.indices.functions import (
    find_nonzero_indices_with_count as find_nonzero_indices_with_count,
)
from neuronjax.primitives.indices.functions import indexed_flatten as indexed_flatten
