"""Rotary position embedding."""

from neuronjax.primitives.rope.functions import RoPE as RoPE
from neuronjax.primitives.rope.functions import rope_hf as rope_hf
from neuronjax.primitives.rope.macro import rope as rope
from neuronjax.primitives.rope.macro import rope_kernel as rope_kernel
