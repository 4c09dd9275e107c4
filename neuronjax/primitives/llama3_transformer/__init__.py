"""The decoder stack of Llama 3 in prefill, as one macro."""

from neuronjax.primitives.llama3_transformer.functions import (
    llama3_transformer as llama3_transformer,
)
from neuronjax.primitives.llama3_transformer.functions import (
    llama3_transformer_kernel as llama3_transformer_kernel,
)
