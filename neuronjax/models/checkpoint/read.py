"""Chooses the reader of a checkpoint by what the path is."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from neuronjax.models.config import LlamaConfig

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def read_checkpoint(
    path: str | os.PathLike[str], *, dtype: DTypeLike = "float32"
) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    """Reads a checkpoint into host memory.

    Args:
        path: a `.gguf` file, or a folder with `config.json` and `*.safetensors`.
        dtype: floating type of the arrays; quantized weights are expanded to it.

    Returns:
        The configuration, and the weights by Hugging Face name
        (`model.layers.3.self_attn.q_proj.weight`), matrices as `[out, in]`.

    Raises:
        FileNotFoundError: nothing is at `path`.
        ValueError: the file is truncated, does not fit its configuration, or is of a
            kind that is not read. Pickled checkpoints are never opened: unpickling
            runs whatever code the file's author put there.
    """
    path = _checked(path)
    if path.is_dir():
        from neuronjax.models.checkpoint.safetensors import read_safetensors

        return read_safetensors(path, dtype=dtype)
    from neuronjax.models.checkpoint.gguf import read_gguf

    return read_gguf(path, dtype=dtype)


def read_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration of a checkpoint, without its weights; see `read_checkpoint`."""
    path = _checked(path)
    if path.is_dir():
        from neuronjax.models.checkpoint.safetensors import read_folder_config

        return read_folder_config(path)
    from neuronjax.models.checkpoint.gguf import read_gguf_config

    return read_gguf_config(path)


def _checked(path: str | os.PathLike[str]) -> Path:
    """The path of a folder or of a GGUF file; anything else is refused."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    kind = path.suffix.lower()
    if path.is_dir() or kind == ".gguf":
        return path
    if kind in _PICKLED:
        raise ValueError(
            f"{path}: expected .gguf or a folder with *.safetensors, got {kind}, "
            "a pickle, which can run code when read"
        )
    if kind == ".safetensors":
        raise ValueError(
            f"{path}: expected the folder that also holds config.json, got one file"
        )
    raise ValueError(
        f"{path}: expected .gguf or a folder with *.safetensors, "
        f"got {kind or 'a file without a suffix'}"
    )
