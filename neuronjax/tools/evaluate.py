"""What `neuronjax eval` does: the perplexity of a text in every form of a model."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from neuronjax.models.llama import Llama
from neuronjax.models.perplexity import perplexity
from neuronjax.models.pretrained import Pretrained, load_pretrained
from neuronjax.nn.quantization import MODES, quantize, stored_bytes
from neuronjax.tools.text import standard_library_text

FORMS = ("float32", "bfloat16", *MODES)
Start = Callable[[str, int], Callable[[int], None]]
# How many tokens fix the scales of activations.
CALIBRATION_TOKENS = 2048
CALIBRATION_WINDOW = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """One form of a model, measured.

    Attributes:
        form: `float32`, `bfloat16`, or a mode of `neuronjax.quantize`.
        perplexity: of the text.
        tokens: how many tokens were predicted.
        stored: bytes of all parameters.
        seconds: time of scoring, with one compilation.
    """

    form: str
    perplexity: float
    tokens: int
    stored: int
    seconds: float


def quantized(loaded: Pretrained, mode: str) -> Llama:
    """`neuronjax.quantize`, calibrated where the mode needs it.

    The calibration reads 2048 tokens of the standard library's documentation, in rows
    of 256.

    Args:
        loaded: its layers are a list.
        mode: of `neuronjax.quantize`.
    """
    if mode != "static-fp8":
        return quantize(loaded.model, mode)
    tokens = calibration_tokens(loaded.tokenizer)
    count = min(len(tokens), CALIBRATION_TOKENS)
    window = min(count, CALIBRATION_WINDOW)
    rows = jnp.array(tokens[: count // window * window], jnp.int32)
    return quantize(loaded.model, mode, calibration=rows.reshape(-1, 1, window))


def calibration_tokens(tokenizer) -> list[int]:
    """Tokens of the standard library's documentation, enough for a calibration."""
    return tokenizer.encode(standard_library_text()[: 8 * CALIBRATION_TOKENS])


def evaluate(
    name: str,
    text: str,
    *,
    forms: Iterable[str] = FORMS,
    window: int = 512,
    limit: int | None = None,
    start: Start = lambda form, count: lambda done: None,
) -> list[Row]:
    """Scores `text` with a model in each of `forms`.

    Args:
        name: as in `load_pretrained`.
        text: what is scored.
        forms: which of `FORMS`.
        window: tokens a window.
        limit: score this many tokens at most; None for all.
        start: called with a form and the number of tokens to predict; what it returns
            is called after each window with how many were predicted.
    """
    rows = []
    load = functools.cache(lambda dtype: load_pretrained(name, dtype=dtype))
    for form in forms:
        loaded = load("float32" if form in MODES else form)
        ids = loaded.tokenizer.encode(text)[:limit]
        model = quantized(loaded, form) if form in MODES else loaded.model
        model = model.stacked()
        step = start(form, len(ids) - 1)
        before = time.perf_counter()
        score = perplexity(model, ids, window=window, step=step)
        seconds = time.perf_counter() - before
        size = stored_bytes(model)
        rows.append(Row(form, score.value, score.tokens, size, seconds))
    return rows


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Start]:
    """A bar for each form, counting tokens; `start` of `evaluate`."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def start(form: str, count: int) -> Callable[[int], None]:
            bar = bars.add_task(form, total=count)
            return lambda done: bars.advance(bar, done)

        yield start


def table(rows: Sequence[Row], window: int) -> Table:
    """The rows as a table, beside the first."""
    title = f"Perplexity of {rows[0].tokens} tokens in windows of {window}"
    shown = Table(title=title)
    for name in ("form", "perplexity", "x float32", "stored MB", "tokens/s"):
        shown.add_column(name, justify="left" if name == "form" else "right")
    for row in rows:
        shown.add_row(
            row.form,
            f"{row.perplexity:.3f}",
            f"{row.perplexity / rows[0].perplexity:.4f}",
            f"{row.stored / 1e6:.1f}",
            f"{row.tokens / row.seconds:.0f}",
        )
    return shown
