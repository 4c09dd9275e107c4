"""The tokens of a text as batches of windows, in an order that one number resumes."""

import hashlib
from pathlib import Path

import numpy as np
from jaxtyping import Int

from neuronjax.tools.train.config import TrainConfig

_SONNETS = "data/sonnets.txt"


def demo_text() -> str:
    """Shakespeare's sonnets: 154 poems, 95 kB, in the public domain.

    The words are those of the edition of 1609, in modern spelling; each poem stands
    under its Roman number.
    """
    from importlib import resources

    return resources.files("neuronjax").joinpath(_SONNETS).read_text("ascii")


class Text:
    """The tokens of a run, divided into those to learn and those to score.

    Args:
        config: names the text, the window and the share that is only scored.

    Attributes:
        train: tokens to learn.
        validation: tokens to score, from the end of the text; none unless they fill a
            window.
        digest: SHA-256 of all.

    Raises:
        ValueError: the text is shorter than two windows, or `validation` is not 0 and
            leaves less than one window.
        OSError: the file cannot be read.
    """

    def __init__(self, config: TrainConfig) -> None:
        name = config.text
        raw = demo_text().encode() if name is None else Path(name).read_bytes()
        tokens, source = np.frombuffer(raw, np.uint8), name or "the sonnets"
        self.digest = hashlib.sha256(raw).hexdigest()
        cut = len(tokens) - int(len(tokens) * config.validation)
        self.train, self.validation = tokens[:cut], tokens[cut:]
        if len(self.train) < 2 * config.seq:
            raise ValueError(
                f"{source}: expected at least 2 * seq = {2 * config.seq} bytes to "
                f"learn, got {len(self.train)}"
            )
        if config.validation and len(self.validation) <= config.seq:
            raise ValueError(
                f"{source}: validation = {config.validation} must leave more than seq "
                f"= {config.seq} bytes to score, got {len(self.validation)}"
            )


class Windows:
    """Batches of windows; the order depends on the seed and on nothing else.

    Each pass over the text starts at another byte and takes its windows in another
    order; a batch may end one pass and begin the next.

    Args:
        tokens: of the text, at least `2 * seq`.
        seq: tokens to predict in a window, which is one token longer.
        batch: windows of a batch.
        seed: of the order.
        position: windows that were taken before; the next batch is the one that
            would have followed.

    Example:
        >>> text = np.frombuffer(b"the cat sat on the mat", np.uint8)
        >>> one = Windows(text, seq=4, batch=2, seed=0)
        >>> first, second = next(one), next(one)
        >>> again = Windows(text, seq=4, batch=2, seed=0, position=2)
        >>> bool((next(again) == second).all())
        True
    """

    def __init__(
        self,
        tokens: Int[np.ndarray, " tokens"],
        *,
        seq: int,
        batch: int,
        seed: int,
        position: int = 0,
    ) -> None:
        self._tokens, self._seq, self._batch, self._seed = tokens, seq, batch, seed
        self.position = position
        self._per_pass = (len(tokens) - seq) // seq
        self._starts: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Int[np.ndarray, "batch window"]:
        rows = range(self.position, self.position + self._batch)
        self.position += self._batch
        return np.stack([self._window(row) for row in rows]).astype(np.int32)

    def _window(self, row: int) -> np.ndarray:
        number, place = divmod(row, self._per_pass)
        if self._starts[0] != number:
            draw = np.random.default_rng([self._seed, number])
            shift = draw.integers(self._seq)
            order = draw.permutation(self._per_pass)
            self._starts = number, shift + self._seq * order
        start = self._starts[1][place]
        return self._tokens[start : start + self._seq + 1]


def scored_windows(
    tokens: np.ndarray, *, seq: int, batch: int, most: int = 8
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches to score, the same each time: windows side by side, and which count.

    Args:
        tokens: of the text's end.
        seq: tokens to predict in a window.
        batch: windows of a batch; the last is filled up with windows that do not count.
        most: batches; a longer text is scored in its first part.

    Returns:
        Pairs of windows `[batch, seq + 1]` and their weights `[batch]`, 1 or 0.
    """
    count = min((len(tokens) - 1) // seq, most * batch)
    starts = [seq * row for row in range(max(count, 0))]
    batches = []
    for first in range(0, len(starts), batch):
        part = starts[first : first + batch]
        spare = batch - len(part)
        rows = [tokens[s : s + seq + 1] for s in [*part, *part[:1] * spare]]
        counts = np.array([1] * len(part) + [0] * spare, np.float32)
        batches.append((np.stack(rows).astype(np.int32), counts))
    return batches
