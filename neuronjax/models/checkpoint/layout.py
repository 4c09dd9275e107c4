"""What a Llama checkpoint holds: each tensor's Hugging Face name and shape.

Matrices are `[out, in]`, as Hugging Face keeps them. Both readers deliver these names
and check against these shapes before they read a weight.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from neuronjax.models.config import LlamaConfig

Shape = tuple[int, ...]


def tensor_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """The shape of every tensor that a checkpoint of `config` must hold, by name."""
    embedding = (config.vocab_size, config.d_model)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": embedding}
    for index in range(config.num_layers):
        shapes |= {
            f"model.layers.{index}.{name}.weight": shape
            for name, shape in _layer_shapes(config)
        }
    shapes["model.norm.weight"] = (config.d_model,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = embedding
    return shapes


def _layer_shapes(config: LlamaConfig) -> Iterator[tuple[str, Shape]]:
    d_model, d_ff = config.d_model, config.d_ff
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    yield "input_layernorm", (d_model,)
    yield "self_attn.q_proj", (q_width, d_model)
    yield "self_attn.k_proj", (kv_width, d_model)
    yield "self_attn.v_proj", (kv_width, d_model)
    yield "self_attn.o_proj", (d_model, q_width)
    yield "post_attention_layernorm", (d_model,)
    yield "mlp.gate_proj", (d_ff, d_model)
    yield "mlp.up_proj", (d_ff, d_model)
    yield "mlp.down_proj", (d_model, d_ff)


def check_shapes(
    found: Mapping[str, Sequence[int]], expected: Mapping[str, Shape], *, source: str
) -> None:
    """Refuses a checkpoint with a tensor missing, too many, or of another shape.

    Raises:
        ValueError: names the file, the tensor, what was expected and what is there.
    """
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(
                f"{source}: tensor {name!r}: expected shape {shape}, got nothing"
            )
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{source}: tensor {name!r}: expected shape {shape}, "
                f"got {tuple(found[name])}"
            )
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise ValueError(
            f"{source}: tensor {extra[0]!r}: expected the {len(expected)} tensors of a "
            f"Llama decoder, got {len(extra)} more, this one first"
        )


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders each head's rows from interleaved to half-split rotary pairs.

    A GGUF file of a Llama keeps the rows of Q and K as (0, n/2, 1, n/2 + 1, ...) of the
    Hugging Face order, so that neighbours are a rotary pair; this undoes it.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def interleaved_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `half_split_rows`: the order in which GGUF keeps Q and K."""
    rows = weight.shape[0]
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
