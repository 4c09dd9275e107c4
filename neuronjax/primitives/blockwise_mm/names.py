"""The NAMEs of the blockwise experts."""

FORWARD, BACKWARD = "BlockwiseMM", "BlockwiseMMBwd"
