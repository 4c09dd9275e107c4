"""The mixture-of-experts block of a decode step: a composition of macros."""

from neuronjax.primitives.moe_block_tkg.functions import moe_block_tkg as moe_block_tkg
