"""GGUF files, the format of llama.cpp, read with the `gguf` package.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from neuronjax.models.checkpoint.layout import (
    check_shapes,
    half_split_rows,
    tensor_shapes,
)
from neuronjax.models.checkpoint.progress import progress
from neuronjax.models.config import LlamaConfig

try:
    import gguf
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "reading GGUF files needs gguf: pip install 'neuronjax[models]'",
        name=error.name,
    ) from error


def read_gguf(
    path: str | os.PathLike[str], *, dtype: DTypeLike = "float32"
) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Reads a GGUF file of the `llama` architecture; see `read_checkpoint`.

    Every quantization that `gguf` can expand is read. The rows of Q and K come out in
    the Hugging Face order, for half-split rotary embedding.
    """
    path = Path(path)
    config = read_gguf_config(path)
    found = {tensor.name: tensor for tensor in _open(path).tensors}
    names = _gguf_names(config)
    check_shapes(
        {name: _shape(tensor) for name, tensor in found.items()},
        {names[name]: shape for name, shape in tensor_shapes(config).items()},
        source=path.name,
    )
    tensors = {}
    for name, stored in progress(names.items(), f"Reading {path.name}"):
        weight = _expand(found[stored], path.name)
        if name.endswith("q_proj.weight"):
            weight = half_split_rows(weight, config.num_heads)
        elif name.endswith("k_proj.weight"):
            weight = half_split_rows(weight, config.num_kv_heads)
        # A copy even where nothing changes: the file's pages must not stay mapped.
        tensors[name] = weight.astype(dtype, copy=True)
    return config, tensors


def read_gguf_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration that a GGUF file's metadata describes."""
    path = Path(path)
    own_head = any(tensor.name == "output.weight" for tensor in _open(path).tensors)
    return LlamaConfig.from_gguf(
        read_metadata(path), source=path.name, tie_embeddings=not own_head
    )


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The key-value pairs of a GGUF file: strings, numbers, and lists of them.

    Raises:
        ValueError: the file is not a whole GGUF file.
    """
    path = Path(path)
    try:
        return {
            name: field.contents()
            for name, field in _open(path).fields.items()
            if not name.startswith("GGUF.")
        }
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}: not a readable GGUF file: {error}") from error


class _Reader(gguf.GGUFReader):
    """A reader that stops at the end of the file.

    The base class takes what is there when the file ends early: numpy's slices shorten
    silently, and a corrupt length would be walked to its end.
    """

    def _get(self, offset, dtype, count=1, override_order=None):
        # Slices of a memmap are slow, and a vocabulary takes half a million of them:
        # 2.8 s instead of 4.4 s for SmolLM2's file.
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)
        dtype = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
        end = int(offset) + dtype.itemsize * int(count)
        if end > self.data.size:
            raise ValueError(
                f"expected at least {end} bytes, got {self.data.size}: truncated"
            )
        return self.data[int(offset) : end].view(dtype)

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type == gguf.GGUFValueType.ARRAY:
            length = self._get(orig_offs + 4, np.uint64)[0]
            # An item takes a byte at least.
            self._get(orig_offs + 12, np.uint8, length)
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs, fields):
        for field in fields:
            _, _, _, dims, kind, offset = field.parts
            block, block_bytes = gguf.GGML_QUANT_SIZES[_quantization(field, kind[0])]
            size = math.prod(dims.tolist()) * block_bytes // block
            end = start_offs + int(offset[0]) + size
            if end > self.data.size:
                raise ValueError(
                    f"tensor {field.name!r}: expected {size} bytes ending at byte "
                    f"{end}, got a file of {self.data.size} bytes: truncated"
                )
        super()._build_tensors(start_offs, fields)


def _quantization(field: Any, kind: int) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(
            f"tensor {field.name!r}: expected a known GGML type, got type {kind}"
        ) from None


def _open(path: Path) -> gguf.GGUFReader:
    status = path.stat()
    return _open_version(path, status.st_mtime_ns, status.st_size)


# The package walks the vocabulary in Python, about two seconds for 49152 tokens; the
# weights and the tokenizer come from one file.
@functools.lru_cache(maxsize=1)
def _open_version(path: Path, mtime_ns: int, size: int) -> gguf.GGUFReader:
    del mtime_ns
    if not size:
        raise ValueError(f"{path.name}: expected a GGUF file, got an empty file")
    try:
        return _Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        message = error.args[0] if error.args else error
        raise ValueError(f"{path.name}: not a whole GGUF file: {message}") from error


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """GGUF counts axes from the fastest, numpy from the slowest."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _gguf_names(config: LlamaConfig) -> Mapping[str, str]:
    """Hugging Face name to GGUF name, from the package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    names = {}
    for name in tensor_shapes(config):
        stored = table.get_name(name, (".weight",))
        assert stored is not None, name
        names[name] = stored
    return names


def _expand(tensor: gguf.ReaderTensor, source: str) -> np.ndarray:
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"{source}: tensor {tensor.name!r}: expected a type that the gguf package "
            f"can expand, got {tensor.tensor_type.name}"
        ) from None
