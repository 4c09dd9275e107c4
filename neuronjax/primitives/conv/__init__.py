"""Convolutions along one axis."""

from neuronjax.primitives.conv.conv1d import conv1d as conv1d
from neuronjax.primitives.conv.conv1d import conv1d_kernel as conv1d_kernel
from neuronjax.primitives.conv.depthwise import (
    depthwise_conv1d_implicit_gemm as depthwise_conv1d_implicit_gemm,
)
from neuronjax.primitives.conv.depthwise import (
    depthwise_conv1d_kernel as depthwise_conv1d_kernel,
)
from neuronjax.primitives.conv.plan import conv1d_plan as conv1d_plan
