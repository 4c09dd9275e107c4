"""The vocabulary in a GGUF file, as a tokenizer.

Two kinds are expressed. `gpt2` is byte-level BPE with its merges; the word under
`tokenizer.ggml.pre` names the regular expression that splits the text first. `llama` is
SentencePiece BPE: it keeps a score a token instead of merges, and the merge with the
best score comes first, so the merges can be listed from the scores.

The expressions are those of llama.cpp, src/llama-vocab.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_BYTE_LEVEL = {"gpt-2": None, "smollm": None, "llama-bpe": _LLAMA3, "qwen2": _QWEN2}


def tokenizer_from_metadata(
    metadata: Mapping[str, Any], *, source: str
) -> tokenizers.Tokenizer:
    """Builds the tokenizer that the key-value pairs of a GGUF file describe.

    Raises:
        ValueError: a field is missing or damaged, or the kind of vocabulary is not one
            of those that are read.
    """
    fields = _Vocabulary(metadata, source)
    kind = fields.get("model")
    if kind == "gpt2":
        backend = _byte_level(fields)
    elif kind == "llama":
        backend = _sentencepiece(fields)
    else:
        raise fields.refusal("model", "'gpt2' or 'llama'", kind)
    _add_special_tokens(backend, fields)
    return backend


class _Vocabulary:
    """The `tokenizer.ggml` fields of one file; complaints name the file and field."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata, self._source = metadata, source
        self.tokens: list[str] = self._listing("tokens", str)
        if len(set(self.tokens)) != len(self.tokens):
            raise self.refusal("tokens", "distinct tokens", "one twice")
        kinds = metadata.get("tokenizer.ggml.token_type")
        self.kinds: Sequence[int] = kinds or [1] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            expected = f"one for each of the {len(self.tokens)} tokens"
            raise self.refusal("token_type", expected, f"{len(self.kinds)}")

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def token(self, name: str) -> str | None:
        """The text of the token whose id the field `name` holds."""
        index = self.get(name)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise self.refusal(name, f"an id below {len(self.tokens)}", index)
        return str(self.tokens[index])

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._listing("merges", str)]
        known = set(self.tokens)
        for pair in pairs:
            if len(pair) != 2 or not known.issuperset(pair):
                raise self.refusal("merges", "pairs of tokens", " ".join(pair))
        return pairs

    def scores(self) -> Sequence[float]:
        scores = self._listing("scores", float)
        if len(scores) != len(self.tokens):
            expected = f"one for each of the {len(self.tokens)} tokens"
            raise self.refusal("scores", expected, f"{len(scores)}")
        return scores

    def _listing(self, name: str, kind: type) -> list[Any]:
        values = self.get(name)
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise self.refusal(name, f"a list of {kind.__name__}", type(values))
        return values

    def refusal(self, name: str, expected: str, got: Any) -> ValueError:
        return ValueError(
            f"{self._source}: field 'tokenizer.ggml.{name}': expected {expected}, "
            f"got {got if isinstance(got, str) and ' ' in got else repr(got)}"
        )


def _byte_level(fields: _Vocabulary) -> tokenizers.Tokenizer:
    pre = fields.get("pre")
    if pre not in _BYTE_LEVEL:
        known = ", ".join(repr(name) for name in _BYTE_LEVEL)
        raise fields.refusal("pre", f"one of {known}", pre)
    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=fields.merges(),
            # Llama 3 keeps whole words that its merges cannot reach.
            ignore_merges=pre == "llama-bpe",
        )
    )
    space = bool(fields.get("add_space_prefix", False))
    expression = _BYTE_LEVEL[pre]
    steps: list[Any] = []
    if pre == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if expression:
        steps.append(pre_tokenizers.Split(Regex(expression), "isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=expression is None)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: _Vocabulary) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(fields.tokens)}
    space = bool(fields.get("add_space_prefix", True))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(fields.tokens, fields.scores()),
            unk_token=fields.token("unknown_token_id"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *strip,
        ]
    )
    return backend


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, by the score of the whole, best first."""
    rank = {token: index for index, token in enumerate(tokens)}
    merges = [
        (scores[index], -index, token[:cut], token[cut:])
        for index, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(left, right) for _, _, left, right in merges]


def _add_special_tokens(backend: tokenizers.Tokenizer, fields: _Vocabulary) -> None:
    for index, kind in enumerate(fields.kinds):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            token = AddedToken(
                fields.tokens[index], normalized=False, special=kind != _USER_DEFINED
            )
            backend.add_tokens([token])
    pre = fields.get("pre")
    by_default = fields.get("model") == "llama" or pre == "llama-bpe"
    bos, eos = fields.token("bos_token_id"), fields.token("eos_token_id")
    first = bos if fields.get("add_bos_token", by_default) else None
    last = eos if fields.get("add_eos_token", False) else None
    if first is None and last is None:
        return
    around = [token for token in (first, "$A", last) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=around,
        special_tokens=[
            (token, backend.token_to_id(token)) for token in {*around} - {"$A"}
        ],
    )
