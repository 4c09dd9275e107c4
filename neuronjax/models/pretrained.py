"""A model and its tokenizer from one name."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from neuronjax.models.checkpoint import read_checkpoint
from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama
from neuronjax.models.load import load_llama

if TYPE_CHECKING:
    from neuronjax.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What `load_pretrained` returns."""

    model: Llama
    tokenizer: Tokenizer
    config: LlamaConfig


def load_pretrained(
    model: str | os.PathLike[str],
    *,
    dtype: Any = np.float32,
    scan_layers: bool = False,
) -> Pretrained:
    """Finds, reads and builds a model.

    Args:
        model: `smollm2`, a `.gguf` file, a folder in the Hugging Face layout, or a hub
            id such as `org/name`.
        dtype: dtype of parameters and computation.
        scan_layers: keep the layers stacked, which compiles faster; see `Llama`.

    Raises:
        DownloadError: it has to be fetched and could not be.
        FileNotFoundError: `model` is none of these.
        ValueError: a file is damaged or asks for what the decoder does not compute.
    """
    # Here, so that `neuronjax.models` can be imported without the extra `models`.
    from neuronjax.models.hub import locate
    from neuronjax.models.tokenizer import Tokenizer

    path = locate(model)
    tokenizer = Tokenizer.load(path)
    config, tensors = read_checkpoint(path, dtype=dtype)
    # An id past the embedding would be clamped onto its last row, and answered.
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path.name}: expected at most vocab_size = {config.vocab_size} tokens in "
            f"the tokenizer, got {tokenizer.vocab_size}"
        )
    decoder = load_llama(config, tensors, dtype, scan_layers=scan_layers)
    return Pretrained(decoder, tokenizer, config)
