"""RMSNorm with fp8 results: public functions, the macro, and the rules of its calls."""

from neuronjax.primitives.rmsnorm_quant.functions import (
    RmsNormQuantKernelArgs as RmsNormQuantKernelArgs,
)
from neuronjax.primitives.rmsnorm_quant.functions import pack_rows as pack_rows
from neuronjax.primitives.rmsnorm_quant.functions import rmsnorm_quant as rmsnorm_quant
from neuronjax.primitives.rmsnorm_quant.functions import unpack_rows as unpack_rows
