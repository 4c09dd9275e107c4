"""The fused decode block: public function, the macros, and the rules of its calls."""

from neuronjax.primitives.attention_block_tkg.functions import (
    attention_block_tkg as attention_block_tkg,
)
