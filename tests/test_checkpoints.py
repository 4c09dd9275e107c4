"""What is read equals what was written; what is damaged is refused by name."""

import dataclasses
import json
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from neuronjax.models.checkpoint import read_checkpoint, read_config
from neuronjax.models.checkpoint.layout import half_split_rows, interleaved_rows
from neuronjax.models.config import LlamaConfig
from tests.tiny_checkpoints import (
    CONFIG,
    gguf_metadata,
    hf_config,
    random_tensors,
    write_folder,
    write_gguf,
)

Q_NAME = "model.layers.1.self_attn.q_proj.weight"


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def refuse(path, *words):
    """Reading `path` is one ValueError that holds all of `words`."""
    with pytest.raises(ValueError) as caught:
        read_checkpoint(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_read_as_it_was_written(tmp_path, shards):
    tensors = random_tensors()
    config, got = read_checkpoint(write_folder(tmp_path, tensors, shards=shards))
    assert config == CONFIG
    assert_equal(got, tensors)


def test_a_gguf_file_is_read_as_it_was_written(tmp_path):
    tensors = random_tensors()
    config, got = read_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert config == CONFIG
    assert_equal(got, tensors)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_quantized_gguf_file_is_expanded(tmp_path, kind):
    tensors = random_tensors()
    _, got = read_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, kind=kind))
    quantization = gguf.GGMLQuantizationType[kind]
    for name, weight in tensors.items():
        if weight.ndim == 2:
            stored = gguf.quantize(weight, quantization)
            weight = gguf.dequantize(stored, quantization)
        np.testing.assert_array_equal(got[name], weight, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(tmp_path, dtype):
    tensors = random_tensors()
    folder = write_folder(tmp_path / "folder", tensors)
    file = write_gguf(tmp_path / "m.gguf", tensors)
    for path in (folder, file):
        _, got = read_checkpoint(path, dtype=dtype)
        assert {str(value.dtype) for value in got.values()} == {dtype}
        np.testing.assert_array_equal(got[Q_NAME], tensors[Q_NAME].astype(dtype))


def test_bfloat16_safetensors_are_read(tmp_path):
    tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in random_tensors().items()}
    _, got = read_checkpoint(write_folder(tmp_path, tensors))
    assert_equal(got, {n: t.astype(np.float32) for n, t in tensors.items()})


def test_the_configuration_is_read_without_the_weights(tmp_path):
    folder = write_folder(tmp_path / "folder", random_tensors())
    (folder / "model.safetensors").unlink()
    assert read_config(folder) == CONFIG
    file = write_gguf(tmp_path / "m.gguf", random_tensors())
    assert read_config(file) == CONFIG
    with pytest.raises(ValueError, match="pickle"):
        (tmp_path / "m.bin").touch()
        read_config(tmp_path / "m.bin")


def test_gguf_rows_pair_neighbours_and_ours_pair_halves():
    rows = np.arange(8)[:, None]
    stored = interleaved_rows(rows, 2)
    assert stored.ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(half_split_rows(stored, 2), rows)


def test_a_tied_model_needs_no_output_projection(tmp_path):
    tensors = random_tensors(dataclasses.replace(CONFIG, tie_embeddings=True))
    changes = {"tie_word_embeddings": True}
    folder = write_folder(tmp_path / "folder", tensors, **changes)
    file = write_gguf(tmp_path / "m.gguf", tensors)
    for path in (folder, file):
        config, got = read_checkpoint(path)
        assert config.tie_embeddings
        assert_equal(got, tensors)


def test_a_tied_projection_kept_twice_must_be_the_embedding(tmp_path):
    tensors = random_tensors()
    folder = write_folder(tmp_path, tensors, tie_word_embeddings=True)
    refuse(folder, "model.safetensors", "lm_head.weight", "tie_word_embeddings")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    _, got = read_checkpoint(write_folder(folder, tensors, tie_word_embeddings=True))
    assert "lm_head.weight" not in got


@pytest.mark.parametrize("write", [write_folder, write_gguf])
def test_a_misshapen_tensor_is_named(tmp_path, write):
    path = tmp_path / "m.gguf"
    stored = Q_NAME if write is write_folder else "blk.1.attn_q.weight"
    tensors = random_tensors()
    tensors[Q_NAME] = tensors[Q_NAME][:64]
    refuse(write(path, tensors), stored, "expected shape (128, 64), got (64, 64)")


@pytest.mark.parametrize("write", [write_folder, write_gguf])
def test_a_missing_tensor_is_named(tmp_path, write):
    stored = Q_NAME if write is write_folder else "blk.1.attn_q.weight"
    tensors = random_tensors()
    del tensors[Q_NAME]
    path = write(tmp_path / "m.gguf", tensors)
    refuse(path, f"tensor {stored!r}", "expected shape (128, 64), got nothing")


@pytest.mark.parametrize("write", [write_folder, write_gguf])
def test_an_extra_tensor_is_named(tmp_path, write):
    tensors = random_tensors() | {"stray.scale": np.ones(3, np.float32)}
    refuse(write(tmp_path / "m.gguf", tensors), "'stray.scale'", "21 tensors", "1 more")


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 4000, -4000, -1])
def test_a_truncated_gguf_file_is_refused(tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf", random_tensors())
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep >= 0 else len(data) + keep])
    refuse(path, "m.gguf")
    if keep < 0:
        refuse(path, "tensor 'output.weight'", "truncated", f"{len(data) + keep} bytes")


def test_a_gguf_file_with_an_impossible_length_ends_at_once(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_tensors())
    data = bytearray(path.read_bytes())
    # The length of the list of token types follows its key and two type words.
    at = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    data[at : at + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)
    refuse(path, "m.gguf", "truncated")


def test_what_is_no_gguf_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    refuse(path, "m.gguf", "magic")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_truncated_safetensors_file_is_refused(tmp_path, keep, shards):
    write_folder(tmp_path, random_tensors(), shards=shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep >= 0 else len(data) + keep])
    refuse(tmp_path, path.name)
    if keep == -1:
        refuse(tmp_path, "tensor ", "truncated", f"{len(data)}", f"{len(data) - 1}")


def test_a_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, random_tensors(), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refuse(tmp_path, "model-00002-of-00002.safetensors", "none")


def test_a_shard_without_its_tensor_is_named(tmp_path):
    write_folder(tmp_path, random_tensors(), shards=2)
    path = tmp_path / "model-00001-of-00002.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(iter(tensors))
    del tensors[name]
    safetensors.numpy.save_file(tensors, path)
    refuse(tmp_path, path.name, repr(name), "no file")


def test_an_index_reaches_no_file_outside_its_folder(tmp_path):
    write_folder(tmp_path / "a", random_tensors(), shards=2)
    index = tmp_path / "a" / "model.safetensors.index.json"
    text = index.read_text().replace("model-00002", "../model-00002")
    index.write_text(text)
    refuse(tmp_path / "a", "model.safetensors.index.json", "expected a file name")


def test_integer_weights_are_refused(tmp_path):
    tensors = random_tensors()
    tensors[Q_NAME] = tensors[Q_NAME].astype(np.int8)
    refuse(write_folder(tmp_path, tensors), "model.safetensors", Q_NAME, "I8")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_is_never_opened(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\x80\x04.")
    refuse(path, path.name, "pickle")


def test_a_folder_of_pickles_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    refuse(tmp_path, "pytorch_model.bin", "pickle", "model.safetensors")


def test_other_paths_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_checkpoint(tmp_path / "nowhere.gguf")
    refuse(tmp_path, "config.json")
    (tmp_path / "config.json").write_text("{")
    refuse(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    refuse(tmp_path, "model.safetensors", "none")
    (tmp_path / "model.safetensors").touch()
    refuse(tmp_path / "model.safetensors", "folder", "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_interleaved", True),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 64),
        ("quantization_config", {"bits": 4}),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("num_attention_heads", [4, 4]),
        ("rms_norm_eps", "small"),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("head_dim", 31),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(tmp_path, field, value):
    folder = write_folder(tmp_path, random_tensors(), **{field: value})
    ours = {
        "num_key_value_heads": "num_kv_heads",
        "num_hidden_layers": "num_layers",
    }.get(field, field)
    refuse(folder, "config.json", ours, "got" if value else "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.expert_count", 8),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.value_length", 16),
        ("llama.rope.dimension_count", 16),
        ("llama.embedding_length", None),
        ("llama.attention.layer_norm_rms_epsilon", None),
    ],
)
def test_gguf_metadata_that_cannot_be_run_is_refused(tmp_path, field, value):
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), fields={field: value})
    refuse(path, "m.gguf", field, "got")


def test_another_architecture_is_refused():
    metadata = gguf_metadata() | {"general.architecture": "phi3"}
    with pytest.raises(ValueError, match="x.gguf: field 'general.architecture'"):
        LlamaConfig.from_gguf(metadata, source="x.gguf", tie_embeddings=True)


def test_both_spellings_of_the_rotary_base_are_read():
    raw = hf_config(rope_theta=None)
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e4}
    assert LlamaConfig.from_hf(raw).rope_theta == 7e4
    assert LlamaConfig.from_hf(hf_config(rope_theta=None)).rope_theta == 1e4


def test_the_generation_settings_decide_the_end_tokens():
    config = LlamaConfig.from_hf(hf_config(), generation={"eos_token_id": [259, 261]})
    assert config.eos_ids == (259, 261)
    assert LlamaConfig.from_hf(hf_config(), generation={}).eos_ids == (259,)
    assert LlamaConfig.from_hf(hf_config(eos_token_id=None)).eos_ids == ()


def test_a_null_field_means_the_same_as_none():
    raw = hf_config(head_dim=None, num_key_value_heads=None, sliding_window=None)
    config = LlamaConfig.from_hf(raw)
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_smollm2_is_read(smollm2_path):
    config, tensors = read_checkpoint(smollm2_path, dtype="bfloat16")
    assert config.num_layers == 30 and config.tie_embeddings
    assert config.eos_ids == (2,) and config.rope_theta == 1e5
    assert len(tensors) == 272
    assert sum(tensor.size for tensor in tensors.values()) == 134_515_008
