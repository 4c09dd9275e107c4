"""Checkpoint tensors into a model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama
from neuronjax.models.packing import pack_qkv


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
    layers: Any = [_layer(tensors, i, config) for i in range(config.num_layers)]
    if scan_layers:
        layers = jax.tree.map(lambda *rows: np.stack(rows), *layers)
    else:
        layers = dict(enumerate(layers))
    values = {
        "embedding": tensors["model.embed_tokens.weight"],
        "norm": {"scale": tensors["model.norm.weight"]},
        "layers": layers,
    }
    if not config.tie_embeddings:
        values["head"] = tensors["lm_head.weight"]
    graph, state = nnx.split(model)
    jax.tree.map(_require_shape, values, nnx.to_pure_dict(state))
    arrays = jax.tree.map(lambda value: jnp.asarray(value, dtype), values)
    nnx.replace_by_pure_dict(state, arrays)
    return nnx.merge(graph, state)


def _layer(tensors: Mapping[str, np.ndarray], index: int, config: LlamaConfig) -> dict:
    """One layer's parameters under our names."""

    def weight(name: str) -> np.ndarray:
        return tensors[f"model.layers.{index}.{name}.weight"]

    projections = (weight(f"self_attn.{n}_proj").T for n in "qkv")
    return {
        "attention": {
            "qkv": pack_qkv(*projections),
            "out": weight("self_attn.o_proj").T,
            "norm": weight("input_layernorm"),
        },
        "mlp": {
            "gate": weight("mlp.gate_proj").T,
            "up": weight("mlp.up_proj").T,
            "down": weight("mlp.down_proj").T,
            "norm": weight("post_attention_layernorm"),
        },
    }


def _require_shape(value: np.ndarray, parameter: jax.ShapeDtypeStruct) -> None:
    if value.shape != parameter.shape:
        raise ValueError(
            f"load_llama: expected a parameter of shape {parameter.shape}, "
            f"got {value.shape}"
        )
