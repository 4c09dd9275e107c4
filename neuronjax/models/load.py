"""Checkpoint tensors into a model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama
from neuronjax.models.packing import from_hugging_face


def load_llama(
    config: LlamaConfig,
    tensors: Mapping[str, np.ndarray],
    dtype: Any = jnp.float32,
    *,
    scan_layers: bool = False,
) -> Llama:
    """Builds a `Llama` from weights under their Hugging Face names.

    Args:
        config: the decoder's sizes.
        tensors: `model.layers.0.self_attn.q_proj.weight` etc., matrices `[out, in]`.
        dtype: dtype of parameters and computation.
        scan_layers: keep the layers stacked; see `Llama`.

    Raises:
        KeyError: a tensor is missing.
        ValueError: a tensor has another shape than the configuration says.
    """
    model = nnx.eval_shape(
        lambda: Llama(
            config, scan_layers=scan_layers, param_dtype=dtype, rngs=nnx.Rngs(0)
        )
    )
    values = from_hugging_face(tensors, config.num_layers)
    if config.tie_embeddings:
        values.pop("head", None)
    else:
        values["head"] = tensors["lm_head.weight"]
    if scan_layers:
        layers = values["layers"].values()
        values["layers"] = jax.tree.map(lambda *rows: np.stack(rows), *layers)
    graph, state = nnx.split(model)
    jax.tree.map(_require_shape, values, nnx.to_pure_dict(state))
    arrays = jax.tree.map(lambda value: jnp.asarray(value, dtype), values)
    nnx.replace_by_pure_dict(state, arrays)
    return nnx.merge(graph, state)


def _require_shape(value: np.ndarray, parameter: jax.ShapeDtypeStruct) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"load_llama: expected a parameter of shape {parameter.shape}, "
            f"got {value.shape}"
        )
