"""The shape of a Llama decoder, read from the metadata of a checkpoint.

A checkpoint may ask for what this decoder does not compute (another architecture,
scaled rotary angles, biases). Such a file is refused here, by the name of the field,
before any weight is read: a model that runs with the wrong equations still answers.
"""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants that every decoder here has; hashable.

    Attributes:
        vocab_size: rows of the embedding.
        d_model: width of the residual stream.
        d_ff: width of the MLP between its projections.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads, which groups of query heads share.
        head_dim: width of one head; the rotary embedding turns all of it.
        rope_theta: base of the rotary angles, `theta**(-2i / head_dim)` per position.
        norm_eps: added to the mean square in every RMSNorm.
        tie_embeddings: the output projection is the embedding itself.
        max_seq: positions that the model was trained for.
        bos_id: token that begins a text, if the model has one.
        eos_ids: tokens that end an answer.
    """

    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_seq: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{kind}: {name} must be positive, got {getattr(self, name)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{kind}: num_heads must be a multiple of num_kv_heads = "
                f"{self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"{kind}: head_dim must be even, since the rotary embedding turns "
                f"pairs, got {self.head_dim}"
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The shape of a Llama decoder, and its readers; it can be a static argument.

    Its fields are those of `DecoderConfig`.
    """

    @classmethod
    def from_hf(
        cls,
        raw: Mapping[str, Any],
        *,
        source: str = "config.json",
        generation: Mapping[str, Any] | None = None,
    ) -> "LlamaConfig":
        """Reads the contents of a Hugging Face `config.json`.

        Args:
            raw: the parsed `config.json`.
            source: the file's name, for errors.
            generation: the parsed `generation_config.json`; its end tokens win, since
                chat models keep there the one that ends a turn.

        Raises:
            ValueError: a field is missing, has another type, or asks for what this
                decoder does not compute.
        """
        fields = _Fields(_present(raw, source), source)
        fields.require("model_type", ("llama", "mistral"))
        for name, *allowed in _HF_SUPPORTED:
            fields.require(name, allowed, default=allowed[0])
        max_seq = fields.integer("max_position_embeddings", 2048)
        if fields.integer("sliding_window", max_seq) < max_seq:
            raise fields.refusal("sliding_window", f"null or at least {max_seq}")
        num_heads = fields.integer("num_attention_heads")
        ends = [fields.raw.get("eos_token_id"), (generation or {}).get("eos_token_id")]
        return fields.build(
            cls,
            vocab_size=fields.integer("vocab_size"),
            d_model=fields.integer("hidden_size"),
            d_ff=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=_head_dim(fields, "head_dim", "hidden_size", num_heads),
            rope_theta=_hf_rope_theta(fields),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_embeddings=bool(fields.raw.get("tie_word_embeddings", False)),
            max_seq=max_seq,
            bos_id=fields.raw.get("bos_token_id"),
            eos_ids=_ids(ends[0] if ends[1] is None else ends[1]),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, source: str, tie_embeddings: bool
    ) -> "LlamaConfig":
        """Reads the key-value pairs of a GGUF file.

        Args:
            metadata: key to value; strings, numbers and lists.
            source: the file's name, for errors.
            tie_embeddings: whether the file has no output projection of its own, which
                is how GGUF says that the embedding serves.

        Raises:
            ValueError: as for `from_hf`.
        """
        fields = _Fields(_present(metadata, source), source)
        fields.require("general.architecture", ("llama",))
        fields.require("llama.rope.scaling.type", ("none",), default="none")
        fields.require("llama.expert_count", (0,), default=0)
        num_heads = fields.integer("llama.attention.head_count")
        key, width = "llama.attention.key_length", "llama.embedding_length"
        head_dim = _head_dim(fields, key, width, num_heads)
        for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
            fields.require(name, (head_dim,), default=head_dim)
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        ends = [metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot")]
        return fields.build(
            cls,
            vocab_size=fields.integer("llama.vocab_size", len(tokens) or _MISSING),
            d_model=fields.integer("llama.embedding_length"),
            d_ff=fields.integer("llama.feed_forward_length"),
            num_layers=fields.integer("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=_single(fields.number("llama.rope.freq_base", 10000.0)),
            norm_eps=_single(fields.number("llama.attention.layer_norm_rms_epsilon")),
            tie_embeddings=tie_embeddings,
            max_seq=fields.integer("llama.context_length"),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=_ids([end for end in ends if end is not None]),
        )


_SIZES = (
    "vocab_size",
    "d_model",
    "d_ff",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_seq",
)

# Fields of config.json and the values that this decoder computes; the first is meant
# where the field is absent.
_HF_SUPPORTED: tuple[tuple[Any, ...], ...] = (
    ("hidden_act", "silu", "swish"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("rope_interleaved", False),
    ("partial_rotary_factor", 1.0),
    ("quantization_config", None),
)


def _present(raw: Any, source: str) -> dict[str, Any]:
    """The fields that say something: a null means the same as an absent field."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"{source}: expected an object, got {type(raw).__name__}")
    return {name: value for name, value in raw.items() if value is not None}


def _head_dim(fields: "_Fields", name: str, width: str, num_heads: int) -> int:
    """The field `name`, else the model's width over its heads."""
    if name in fields.raw:
        return fields.integer(name)
    return fields.divide(width, num_heads)


def _hf_rope_theta(fields: "_Fields") -> float:
    """The rotary base, which transformers 5 moved into `rope_parameters`."""
    for name in ("rope_parameters", "rope_scaling"):
        if name not in fields.raw:
            continue
        source = f"{fields.source}: {name}"
        rope = _present(fields.raw[name], source)
        inner = _Fields(rope, source)
        kind = "rope_type" if "rope_type" in rope else "type"
        inner.require(kind, ("default",), default="default")
        inner.require("partial_rotary_factor", (1.0,), default=1.0)
        if "rope_theta" in rope:
            return inner.number("rope_theta")
    return fields.number("rope_theta", 10000.0)


def _single(value: float) -> float:
    """The shortest decimal of a float32: GGUF keeps 1e-5 as 9.99999974e-06."""
    return float(str(np.float32(value)))


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids from null, one id, or a list; each once, in order."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(int(v) for v in values if v is not None))


class _Fields:
    """Reads typed fields of one file; every complaint names the file and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def refusal(self, name: str, expected: str) -> ValueError:
        got = repr(self.raw[name]) if name in self.raw else "nothing"
        got = got if len(got) <= 80 else got[:77] + "..."
        return ValueError(
            f"{self.source}: field {name!r}: expected {expected}, got {got}"
        )

    def require(self, name: str, allowed: Sequence, *, default: Any = None) -> None:
        if self.raw.get(name, default) not in allowed:
            raise self.refusal(name, " or ".join(repr(value) for value in allowed))

    def number(self, name: str, default: float = _MISSING) -> float:
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise self.refusal(name, "a number")
        return float(value)

    def integer(self, name: str, default: int = _MISSING) -> int:
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise self.refusal(name, "one integer")
        return int(value)

    def divide(self, name: str, parts: int) -> int:
        value = self.integer(name)
        if parts < 1 or value % parts:
            raise self.refusal(name, f"a multiple of the {parts} heads")
        return value // parts

    def build(self, cls: type[LlamaConfig], **values: Any) -> LlamaConfig:
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from None
