"""Folders in the Hugging Face layout: `config.json` and one or more `.safetensors`.

Format: https://huggingface.co/docs/safetensors
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the name "bfloat16")
import numpy as np
from numpy.typing import DTypeLike

from neuronjax.models.checkpoint.layout import check_shapes, tensor_shapes
from neuronjax.models.checkpoint.progress import progress
from neuronjax.models.config import LlamaConfig

try:
    import safetensors
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "reading safetensors needs safetensors: pip install 'neuronjax[models]'",
        name=error.name,
    ) from error

_DTYPES = ("F64", "F32", "F16", "BF16")
# Old checkpoints keep the rotary frequencies, which the configuration determines.
_BUFFER = ".rotary_emb.inv_freq"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_safetensors(
    folder: str | os.PathLike[str], *, dtype: DTypeLike = "float32"
) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Reads a folder in the Hugging Face layout; see `read_checkpoint`."""
    folder = Path(folder)
    config = read_folder_config(folder)
    expected = tensor_shapes(config)
    with contextlib.ExitStack() as stack:
        files = {
            file: stack.enter_context(_open(folder / file))
            for file in _weight_files(folder)
        }
        places = {
            name: file
            for file, handle in files.items()
            for name in handle.keys()
            if not name.endswith(_BUFFER)
        }
        _check_index(folder, places)
        tied = places.pop("lm_head.weight", None) if config.tie_embeddings else None
        check_shapes(
            {name: files[f].get_slice(name).get_shape() for name, f in places.items()},
            expected,
            source=_source(folder, files),
        )
        if tied is not None:
            _check_tied(files[tied], files[places["model.embed_tokens.weight"]], tied)
        for name, file in places.items():
            _check_dtype(files[file], name, file)
        return config, {
            name: files[places[name]].get_tensor(name).astype(dtype)
            for name in progress(expected, f"Reading {folder.name}")
        }


def read_folder_config(folder: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration that a folder's `config.json` describes.

    Raises:
        ValueError: there is none, or it asks for what this decoder does not compute.
    """
    folder = Path(folder)
    generation = folder / "generation_config.json"
    return LlamaConfig.from_hf(
        read_json(folder / "config.json"),
        source="config.json",
        generation=read_json(generation) if generation.exists() else None,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; errors name the file and its folder."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent}: expected a file {path.name}, got none"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path.name}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: expected an object, got {type(value).__name__}")
    return value


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the index of a sharded checkpoint."""
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{_INDEX}: expected an object 'weight_map', got {weight_map}")
    for name, file in weight_map.items():
        # An index may come from a stranger: it names files of this folder and no other.
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{_INDEX}: tensor {name!r}: expected a file name, got {file!r}"
            )
    return weight_map


def _weight_files(folder: Path) -> list[str]:
    if (folder / _INDEX).exists():
        return sorted(set(_weight_map(folder).values()))
    if (folder / _SINGLE).exists():
        return [_SINGLE]
    names = sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return found
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    got = f"{len(found)} safetensors files and no index" if found else "none"
    if pickled and not found:
        got = f"{pickled[0]}, a pickle, which can run code when read"
    raise ValueError(f"{folder}: expected {_SINGLE} or {_INDEX}, got {got}")


def _check_index(folder: Path, places: dict[str, str]) -> None:
    """Refuses a shard that lacks a tensor which the index places in it."""
    if not (folder / _INDEX).exists():
        return
    for name, file in _weight_map(folder).items():
        if places.get(name) != file and not name.endswith(_BUFFER):
            raise ValueError(
                f"{file}: tensor {name!r}: expected here by {_INDEX}, "
                f"got it in {places.get(name, 'no file')}"
            )


def _check_tied(head: Any, embedding: Any, file: str) -> None:
    """A checkpoint may keep a tied projection twice, but not two different ones."""
    first = embedding.get_tensor("model.embed_tokens.weight")
    if not np.array_equal(head.get_tensor("lm_head.weight"), first):
        raise ValueError(
            f"{file}: tensor 'lm_head.weight': expected the embedding, since "
            "config.json has tie_word_embeddings, got other values"
        )


def _check_dtype(handle: Any, name: str, file: str) -> None:
    dtype = handle.get_slice(name).get_dtype()
    if dtype not in _DTYPES:
        raise ValueError(
            f"{file}: tensor {name!r}: expected one of {', '.join(_DTYPES)}, "
            f"got {dtype}"
        )


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        handle = safetensors.safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent}: expected a file {path.name}, got none"
        ) from None
    except safetensors.SafetensorError as error:
        raise ValueError(_diagnosis(path, error)) from error
    with handle as opened:
        yield opened


def _diagnosis(path: Path, error: Exception) -> str:
    """Which tensor a damaged file breaks off in, as far as its header can be read."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        header = file.read(min(length, size))
    if 8 + length > size:
        return (
            f"{path.name}: expected a header of {length} bytes, "
            f"got a file of {size} bytes: truncated"
        )
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        for name, entry in json.loads(header).items():
            end = 8 + length + entry["data_offsets"][1] if name[:2] != "__" else 0
            if end > size:
                return (
                    f"{path.name}: tensor {name!r}: expected data up to byte {end}, "
                    f"got a file of {size} bytes: truncated"
                )
    return f"{path.name}: not a whole safetensors file: {error}"


def _source(folder: Path, files: dict[str, Any]) -> str:
    return _INDEX if (folder / _INDEX).exists() else next(iter(files))
