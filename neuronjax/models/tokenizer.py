"""Text to token ids and back, with the `tokenizers` library.

A tokenizer comes from `tokenizer.json` of a Hugging Face folder or from the metadata of
a GGUF file, which holds the vocabulary but names its pre-tokenizer only by a word.
"""

import datetime
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

try:
    import tokenizers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "text needs tokenizers: pip install 'neuronjax[models]'", name=error.name
    ) from error

Message = Mapping[str, Any]

# What `tokenizers` puts where bytes do not make a character, or not yet.
_REPLACEMENT = "\ufffd"


class Tokenizer:
    """Encodes text, decodes token ids at once or as they come, renders chats.

    Attributes:
        bos: text of the token that begins a sequence, or None.
        eos: text of the token that ends one, or None.
        chat_template: the Jinja source that renders a chat, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos: str | None = None,
        eos: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        # A checkpoint's own padding or cutting would change what was asked.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.bos, self.eos, self.chat_template = bos, eos, chat_template

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads the tokenizer of a `.gguf` file or of a folder with `tokenizer.json`.

        Raises:
            ValueError: there is none, or it cannot be expressed.
        """
        path = Path(path)
        if path.is_dir():
            return cls._from_folder(path)
        if path.suffix.lower() == ".gguf":
            from neuronjax.models.checkpoint.gguf import read_metadata

            return cls.from_metadata(read_metadata(path), source=path.name)
        raise ValueError(f"{path}: expected a .gguf file or a folder")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, source: str) -> "Tokenizer":
        """Builds the tokenizer that the key-value pairs of a GGUF file describe."""
        from neuronjax.models.gguf_vocabulary import tokenizer_from_metadata

        backend = tokenizer_from_metadata(metadata, source=source)
        special = {
            name: backend.id_to_token(metadata[f"tokenizer.ggml.{name}_token_id"])
            for name in ("bos", "eos")
            if f"tokenizer.ggml.{name}_token_id" in metadata
        }
        template = metadata.get("tokenizer.chat_template")
        return cls(backend, **special, chat_template=template)

    @classmethod
    def _from_folder(cls, folder: Path) -> "Tokenizer":
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ValueError(f"{folder}: expected a file tokenizer.json, got none")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        # The library raises plain Exception for every damage.
        except Exception as error:
            raise ValueError(
                f"{file.name}: not a readable tokenizer: {error}"
            ) from error
        settings = _read_settings(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        if template_file.exists():
            template = template_file.read_text("utf-8")
        else:
            template = _default_template(settings.get("chat_template"))
        return cls(
            backend,
            bos=_token_text(settings.get("bos_token")),
            eos=_token_text(settings.get("eos_token")),
            chat_template=template,
        )

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text; special tokens written in it are taken as such.
            add_special_tokens: put what the checkpoint asks for around it, such as
                the token that begins a sequence.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(
        self, ids: Iterable[int], *, skip_special_tokens: bool = True
    ) -> Iterator[str]:
        """The text of token ids as they come, in pieces that join to `decode`'s text.

        A character whose bytes are spread over several tokens comes in one piece, with
        the token that completes it. (Where the bytes are no UTF-8, a SentencePiece
        decoder replaces valid neighbours too; here those have been given already.)
        """
        text = TextStream(self, skip_special_tokens=skip_special_tokens)
        for token in ids:
            if piece := text.push(token):
                yield piece
        if rest := text.finish():
            yield rest

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat, by the checkpoint's own template.

        The template is a program from a stranger: it runs in Jinja's sandbox.

        Args:
            messages: dicts with `role` and `content`.
            add_generation_prompt: end with the words that make the model answer.

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        if self.chat_template is None:
            raise ValueError("render_chat: this checkpoint has no chat template")
        import jinja2

        try:
            return (
                _environment()
                .from_string(self.chat_template)
                .render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self.bos or "",
                    eos_token=self.eos or "",
                )
            )
        except (jinja2.TemplateError, TypeError, ArithmeticError) as error:
            raise ValueError(f"render_chat: chat template: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a rendered chat; the template writes the special tokens."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


class TextStream:
    """Token ids in, text out, for a caller who is handed one token at a time."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # The tokens of the last piece are decoded again as context: a decoder strips
        # the space that begins a text, and joins only whole runs of bytes.
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        self._waiting.append(int(token))
        piece = self._piece()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._context, self._waiting = self._waiting, []
        return piece

    def finish(self) -> str:
        """What no further token will complete."""
        piece, self._context, self._waiting = self._piece(), [], []
        return piece

    def _piece(self) -> str:
        before = self._text(self._context)
        return self._text(self._context + self._waiting)[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


def _environment() -> Any:
    """The Jinja environment that Hugging Face templates are written for."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read_settings(path: Path) -> dict[str, Any]:
    from neuronjax.models.checkpoint.safetensors import read_json

    return read_json(path) if path.exists() else {}


def _default_template(value: Any) -> str | None:
    """The template of a text, or the one named `default` in a list of them."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return value


def _token_text(value: Any) -> str | None:
    """A token is a text, or an object with its text in `content`."""
    return value.get("content") if isinstance(value, Mapping) else value
