"""What the rules of the decode block share: entering a row, and arguments to break."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from neuronjax.kernels.quantization.fp8 import E4M3
from neuronjax.primitives import contracts
from neuronjax.primitives.attention_block_tkg.facts import BOTH
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.tile import PARTITIONS


def row(rule: str, message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage, functions = kwargs.pop("stage", 2), kwargs.pop("functions", BOTH)
    rule, text = f"attention_block_tkg.{rule}", "{function}: " + message
    contracts.add(Contract(rule, functions, text, *args, stage=stage, **kwargs))


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def arguments(**changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`: one sequence, two heads of 4."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(
            X=zeros(1, 1, 8),
            W_qkv=zeros(8, 16),
            K_cache=zeros(1, 6, 4),
            V_cache=zeros(1, 6, 4),
            attention_mask=zeros(4, 1, 2, 1, dtype=np.int32),
            kv_cache_update_idx=zeros(1, 1, dtype=np.uint32),
        )
        given |= changes
        return {key: x for key, x in given.items() if x is not None}

    return build


def blocks(**changes: Any):
    """The same with caches of three blocks of four slots, two of them visible."""
    caches: dict[str, Any] = dict.fromkeys(("K_cache", "V_cache"), zeros(3, 4, 4))
    table = zeros(1, 2, dtype=np.uint32)
    mask = zeros(8, 1, 2, 1, dtype=np.int32)
    given = dict(caches, active_blocks_table=table, attention_mask=mask)
    return arguments(**(given | changes))


def fp8(**changes: Any):
    """The same with fp8 caches and their scales."""
    cache, one = zeros(1, 6, 4, dtype=E4M3), np.ones((1, 1), np.float32)
    given = dict(K_cache=cache, V_cache=cache, k_scale=one, v_scale=one)
    return arguments(**(given | changes))


def projecting(**changes: Any):
    """The same with an output projection."""
    return arguments(**(dict(W_out=zeros(8, 8)) | changes))


def repeats(shape: Any, columns: int) -> bool:
    """Whether a scale is one row, or one row repeated on all partitions."""
    return shape in ((1, columns), (PARTITIONS, columns))


def are_given(c: SimpleNamespace, *names: str) -> list[bool]:
    return [getattr(c, name) is not None for name in names]
