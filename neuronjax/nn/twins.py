"""The forward NAMEs that no layer emits, and why a layer would add nothing."""

_TILES = "takes tiles in on-chip memory: layers take arrays, for which its twin stands"
_PROBE = "measures the chip: it has no place in a model"
_STATELESS = "has no parameters and no settings to keep: call the function"
_WIRE = "moves arrays between ranks, without parameters: call the function"

WITHOUT_LAYER = {
    "TiledNativeKernelAttention": _TILES,
    "TiledNativeKernelMLP": _TILES,
    "TiledNativeKernelQKV": _TILES,
    "TiledNativeKernelRMSNormQuant": _TILES,
    "RowTiledMM": _PROBE,
    "ColumnTiledMM": _PROBE,
    "CaymanPackedPETranspose": _PROBE,
    "BIRKernel": "emits the leaf of any NAME: the layers of these NAMEs stand for it",
    "FineGrainedAllGather": _WIRE,
    "FineGrainedReduceScatter": _WIRE,
    "SB2SBAllGather": _WIRE,
    "TopKReduce": _STATELESS,
    "CumSum": _STATELESS,
    "Transpose": _STATELESS,
}
