"""The NAMEs of the family."""

UNTILED, TILED, BACKWARD = "MLP", "TiledNativeKernelMLP", "MLPBwd"
ROW_FP8 = f"{UNTILED} (row fp8)"
STATIC_PREFILL = f"{UNTILED} (static fp8, prefill)"
BLOCK_SCALED = f"{UNTILED} (block-scaled fp4)"
