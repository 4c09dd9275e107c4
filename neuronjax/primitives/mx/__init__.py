"""Block-scaled (MX) values: public functions and the rules of their calls."""

from neuronjax.primitives.mx.blocks import dequantize_mx as dequantize_mx
from neuronjax.primitives.mx.blocks import (
    mxfp_load_performance_wrapper as mxfp_load_performance_wrapper,
)
from neuronjax.primitives.mx.blocks import pack_mx as pack_mx
from neuronjax.primitives.mx.blocks import quantize_mx as quantize_mx
from neuronjax.primitives.mx.blocks import quantize_mx_weight as quantize_mx_weight
from neuronjax.primitives.mx.blocks import quantize_to_mx as quantize_to_mx
from neuronjax.primitives.mx.blocks import unpack_mx as unpack_mx
from neuronjax.primitives.mx.products import down_proj_mx as down_proj_mx
from neuronjax.primitives.mx.products import gate_up_proj_mx as gate_up_proj_mx
from neuronjax.primitives.mx.products import mx_matmul as mx_matmul
from neuronjax.primitives.mx.swizzle import swizzle_hidden as swizzle_hidden
from neuronjax.primitives.mx.swizzle import unswizzle_hidden as unswizzle_hidden
