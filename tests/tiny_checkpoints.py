"""A Llama of a few thousand weights, written as a folder and as a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from neuronjax.models.checkpoint.layout import interleaved_rows, tensor_shapes
from neuronjax.models.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=262,
    d_model=64,
    d_ff=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=5000.0,
    norm_eps=1e-5,
    tie_embeddings=False,
    max_seq=128,
    bos_id=258,
    eos_ids=(259,),
)
MERGES = [("t", "h"), ("th", "e")]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokens() -> list[str]:
    """The 256 bytes as byte-level BPE writes them, two merges, the special tokens."""
    merged = [left + right for left, right in MERGES]
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged, *SPECIAL]


def random_tensors(config: LlamaConfig = CONFIG, seed: int = 0) -> dict:
    """Weights of `config` by Hugging Face name, float32."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / 8 + (len(shape) == 1)).astype(np.float32)
        for name, shape in tensor_shapes(config).items()
    }


def hf_config(config: LlamaConfig = CONFIG, **changes: Any) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_seq,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "hidden_act": "silu",
    } | changes


def write_folder(
    folder: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 1, **changes: Any
) -> Path:
    """Writes the Hugging Face layout, with a tokenizer over bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))
    names = list(tensors)
    if shards == 1:
        safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        for index, file in enumerate(files):
            part = {name: tensors[name] for name in names[index::shards]}
            safetensors.numpy.save_file(part, folder / file)
        places = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": places})
        )
    vocabulary = {token: index for index, token in enumerate(byte_tokens())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>"},
                "eos_token": "</s>",
                "chat_template": TEMPLATE,
            }
        )
    )
    return folder


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    config: LlamaConfig = CONFIG,
    kind: str = "F32",
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a GGUF file; matrices in `kind`; `fields` are changed last, None drops."""
    writer = gguf.GGUFWriter(path, "llama")
    metadata = gguf_metadata(config) | dict(fields or {})
    for name, value in metadata.items():
        if name != "general.architecture" and value is not None:
            writer.add_key_value(name, value, *_gguf_types(value))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    kinds = gguf.GGMLQuantizationType
    for name, weight in tensors.items():
        if name.endswith("q_proj.weight"):
            weight = interleaved_rows(weight, config.num_heads)
        if name.endswith("k_proj.weight"):
            weight = interleaved_rows(weight, config.num_kv_heads)
        stored = table.get_name(name, (".weight",)) or name
        quantization = kinds.F32 if weight.ndim == 1 else kinds[kind]
        data = gguf.quantize(np.ascontiguousarray(weight), quantization)
        writer.add_tensor(stored, data, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_metadata(config: LlamaConfig = CONFIG) -> dict[str, Any]:
    """The key-value pairs of a GGUF file of `config`, with a tokenizer over bytes."""
    tokens = byte_tokens()
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_seq,
        "llama.embedding_length": config.d_model,
        "llama.feed_forward_length": config.d_ff,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3] * len(SPECIAL),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": config.bos_id,
        "tokenizer.ggml.eos_token_id": config.eos_ids[0],
        "tokenizer.chat_template": TEMPLATE,
    }


def _gguf_types(value: Any) -> tuple:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        item = {str: kinds.STRING, float: kinds.FLOAT32}.get(type(value[0]))
        return kinds.ARRAY, item or kinds.INT32
    by_type = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32}
    return (by_type.get(type(value), kinds.STRING),)
