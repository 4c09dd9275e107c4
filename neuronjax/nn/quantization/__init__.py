"""Layers on quantized weights, and the function that puts them into a model."""

from neuronjax.nn.quantization.layers import QuantizedAttention as QuantizedAttention
from neuronjax.nn.quantization.layers import QuantizedMLP as QuantizedMLP
from neuronjax.nn.quantization.quantize import quantize as quantize
from neuronjax.nn.quantization.quantize import stored_bytes as stored_bytes
from neuronjax.nn.quantization.scheme import MODES as MODES
