"""The experts in the form of their weights."""

from neuronjax.kernels.blockwise_mm.experts import Dense, Experts
from neuronjax.kernels.blockwise_mm.mx import BlockScaled
from neuronjax.kernels.blockwise_mm.operands import Operands, Options


def experts_of(ops: Operands, opts: Options, *, is_static: bool = False) -> Experts:
    """Floats, fp8 codes with scales, or blocks with a power of two."""
    if opts.quantization == "MX":
        return BlockScaled(ops, opts)
    return Dense(ops, opts, is_static=is_static)
