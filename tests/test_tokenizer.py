"""Token ids equal the reference's; streams join to the text; templates are caged."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuronjax.models.tokenizer import Tokenizer
from tests.tiny_checkpoints import (
    byte_tokens,
    gguf_metadata,
    random_tensors,
    write_folder,
    write_gguf,
)

CASES = Path(os.environ.get("NEURONJAX_CASES", Path(__file__).parent / "cases"))
CHAT = [{"role": "user", "content": "the 42 ünïts"}]


def tiny(**changes):
    return Tokenizer.from_metadata(gguf_metadata() | changes, source="m.gguf")


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def logits():
    return np.load(CASES / "smollm2" / "logits.npz")


SMOLLM2 = json.loads((CASES / "smollm2" / "index.json").read_text())


@pytest.mark.parametrize("case", SMOLLM2)
def test_smollm2_ids_equal_the_reference(smollm2, logits, case):
    prompt = SMOLLM2[case]["prompt"]
    encode = smollm2.encode if isinstance(prompt, str) else smollm2.encode_chat
    assert encode(prompt) == logits[f"{case}_ids"].tolist()


@pytest.mark.parametrize("case", SMOLLM2)
def test_smollm2_answers_decode_to_the_reference(smollm2, logits, case):
    ids = logits[f"{case}_greedy"].tolist()
    text = SMOLLM2[case]["text"]
    assert smollm2.decode(ids) == text
    assert "".join(smollm2.stream(ids, skip_special_tokens=False)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "a  b\n\n\tc", "2024-01-02", "naïve 世界 👩‍👩‍👧 \u0000 e\u0301"]
)
def test_smollm2_text_survives_the_round_trip(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert "".join(smollm2.stream(ids)) == text


def test_digits_are_single_tokens(smollm2):
    assert len(smollm2.encode("12345")) == 5


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_merges_apply_within_a_word(pre):
    tokenizer = tiny(
        **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    )
    tokens = byte_tokens()
    ids = tokenizer.encode("the th")
    assert [tokens[i] for i in ids] == ["the", "Ġ", "th"]
    assert tokenizer.decode(ids) == "the th"


def test_both_containers_give_one_tokenizer(tmp_path):
    folder = Tokenizer.load(write_folder(tmp_path / "a", random_tensors()))
    file = Tokenizer.load(write_gguf(tmp_path / "m.gguf", random_tensors()))
    for tokenizer in (folder, file):
        assert (tokenizer.bos, tokenizer.eos) == ("<s>", "</s>")
        assert tokenizer.vocab_size == 262
    assert folder.encode_chat(CHAT) == file.encode_chat(CHAT)
    assert folder.render_chat(CHAT) == "<|user|>the 42 ünïts<|assistant|>"


def test_special_tokens_are_one_id_each():
    tokenizer = tiny()
    assert tokenizer.encode("<s></s>") == [258, 259]
    assert tokenizer.decode([258, 256, 259], skip_special_tokens=True) == "th"
    assert tokenizer.decode([258, 256, 259]) == "<s>th</s>"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [256]),
        ({"tokenizer.ggml.add_bos_token": True}, [258, 256]),
        ({"tokenizer.ggml.add_eos_token": True}, [256, 259]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [258, 256]),
    ],
)
def test_the_file_says_what_begins_and_ends_a_text(changes, expected):
    tokenizer = tiny(**changes)
    assert tokenizer.encode("th") == expected
    assert tokenizer.encode("th", add_special_tokens=False) == [256]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 261), max_size=12))
def test_a_stream_joins_to_the_text(ids):
    tokenizer = _TINY
    for skip in (True, False):
        pieces = list(tokenizer.stream(ids, skip_special_tokens=skip))
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert "" not in pieces


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
def test_a_character_is_never_broken(text):
    assert "".join(pieces := list(_TINY.stream(_TINY.encode(text)))) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_the_token_that_completes_it():
    ids = _TINY.encode("a世b")
    assert len(ids) == 5
    assert list(_TINY.stream(ids)) == ["a", "世", "b"]
    assert list(_TINY.stream(ids[:3])) == ["a", "\ufffd"]


def sentencepiece_fields():
    """A SentencePiece vocabulary: bytes, and words with scores."""
    words = {"▁": -9.0, "a": -5.0, "b": -6.0, "ab": -3.0, "ba": -1.0, "▁a": -2.0}
    words |= {"aba": -4.0, "▁ab": -7.0, "c": -8.0, "▁▁": -2.5}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_ids(fields, text):
    """SentencePiece BPE: join the neighbours with the best score until none join."""
    tokens = fields["tokenizer.ggml.tokens"]
    rank = {token: index for index, token in enumerate(tokens)}
    scores = fields["tokenizer.ggml.scores"]
    pieces = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joins = [
            (scores[rank[a + b]], -at)
            for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in rank
        ]
        if not joins:
            break
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = [1]
    for piece in pieces:
        byte_ids = [3 + byte for byte in piece.encode()]
        ids += [rank[piece]] if piece in rank else byte_ids
    return ids


_TINY = tiny()
_SENTENCEPIECE = tiny(**sentencepiece_fields())


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab cé", max_size=10))
def test_sentencepiece_scores_order_the_merges(text):
    ids = _SENTENCEPIECE.encode(text)
    assert ids == sentencepiece_ids(sentencepiece_fields(), text)
    assert _SENTENCEPIECE.decode(ids, skip_special_tokens=True) == text
    assert "".join(_SENTENCEPIECE.stream(ids)) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, ["model", "'gpt2' or 'llama'", "'t5'"]),
        ({"pre": "tekken"}, ["pre", "'smollm'", "'tekken'"]),
        ({"tokens": None}, ["tokens", "a list of str"]),
        ({"tokens": ["a", "a"]}, ["tokens", "distinct"]),
        ({"token_type": [1]}, ["token_type", "262 tokens"]),
        ({"merges": ["t h", "q zz"]}, ["merges", "q zz"]),
        ({"merges": ["t h e"]}, ["merges", "t h e"]),
        ({"bos_token_id": 262}, ["bos_token_id", "below 262", "262"]),
        ({"model": "llama"}, ["scores", "a list of float"]),
        ({"model": "llama", "scores": [0.5]}, ["scores", "262 tokens"]),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused(changes, words):
    with pytest.raises(ValueError, match="m.gguf: field 'tokenizer.ggml") as caught:
        tiny(**{f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    for word in words:
        assert word in str(caught.value)


def test_a_folder_needs_a_readable_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="expected a file tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="tokenizer.json: not a readable"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="expected a .gguf file or a folder"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_template_in_a_file_of_its_own_wins(tmp_path):
    folder = write_folder(tmp_path, random_tensors())
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    assert Tokenizer.load(folder).render_chat(CHAT) == "1"


def test_the_default_of_several_templates_is_taken(tmp_path):
    folder = write_folder(tmp_path, random_tensors())
    named = [
        {"name": "tool_use", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    text = json.dumps({"chat_template": named})
    (folder / "tokenizer_config.json").write_text(text)
    assert Tokenizer.load(folder).render_chat(CHAT) == "d"


def render(template, messages=CHAT, **options):
    tokenizer = tiny(**{"tokenizer.chat_template": template})
    return tokenizer.render_chat(messages, **options)


def test_templates_see_what_hugging_face_gives_them():
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    flag = {"add_generation_prompt": False}
    assert render("{% if add_generation_prompt %}go{% endif %}", **flag) == ""
    assert render("{{ messages[0] | tojson }}") == json.dumps(
        CHAT[0], ensure_ascii=False
    )
    assert render("{% for m in messages %}{% break %}{% endfor %}") == ""
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    # Block lines leave no blank lines behind.
    assert render("  {% if true %}\na\n  {% endif %}\n") == "a\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ range(1000000000) | length }}", "Range too big"),
        ("{% if %}", "Expected"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_refused(template, words):
    with pytest.raises(ValueError, match=f"chat template: .*({words})"):
        render(template)


def test_a_model_without_a_template_says_so():
    with pytest.raises(ValueError, match="has no chat template"):
        render(None)
