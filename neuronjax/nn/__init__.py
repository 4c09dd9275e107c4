"""Flax NNX layers: exact twins of the functions, with partition names on parameters."""

from neuronjax.nn.attention import Attention as Attention
from neuronjax.nn.cache import LayerCache as LayerCache
from neuronjax.nn.cache import write_block_cache as write_block_cache
from neuronjax.nn.cache import write_cache as write_cache
from neuronjax.nn.cache import write_circular_cache as write_circular_cache
from neuronjax.nn.conv import Conv1D as Conv1D
from neuronjax.nn.conv import DepthwiseConv1D as DepthwiseConv1D
from neuronjax.nn.decoder_layer import DecoderLayer as DecoderLayer
from neuronjax.nn.linear import FusedLinear as FusedLinear
from neuronjax.nn.loss import LinearCrossEntropy as LinearCrossEntropy
from neuronjax.nn.mlp import MLP as MLP
from neuronjax.nn.moe import MoE as MoE
from neuronjax.nn.moe import MoEDecoderLayer as MoEDecoderLayer
from neuronjax.nn.norm import RMSNorm as RMSNorm
from neuronjax.nn.quantization import QuantizedAttention as QuantizedAttention
from neuronjax.nn.quantization import QuantizedMLP as QuantizedMLP
from neuronjax.nn.rotary import rotary_tables as rotary_tables
