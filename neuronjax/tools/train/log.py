"""The log of a run: one JSON line a step, cut back to the checkpoint on resuming."""

import dataclasses
import json
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Record:
    """One step.

    Attributes:
        step: its number, from 1.
        loss: mean of a token of its windows, in nats, before the step.
        norm: of the gradient before it was clipped.
        balance: the load-balance loss of the experts; 0 for a dense decoder.
        tokens_per_s: tokens learnt in a second, one compilation left out.
        validation: mean loss of a token of the text's end after the step, where it was
            scored.
    """

    step: int
    loss: float
    norm: float
    balance: float
    tokens_per_s: float
    validation: float | None = None


class Log:
    """The file `log.jsonl` of a run.

    Args:
        file: its path.
        upto: the step of the checkpoint that the run goes on from; later lines, which
            a killed run wrote, are taken away.
    """

    def __init__(self, file: str | Path, *, upto: int = 0) -> None:
        self._file = Path(file)
        self.records = [r for r in read_log(self._file) if r.step <= upto]
        beside = self._file.with_suffix(".part")
        beside.write_text("".join(map(_line, self.records)), "utf-8")
        os.replace(beside, self._file)

    def add(self, record: Record) -> None:
        """Writes a step down at once."""
        self.records.append(record)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Record) -> str:
    return json.dumps(dataclasses.asdict(record)) + "\n"


def read_log(file: str | Path) -> list[Record]:
    """The steps in a log; a last line that was cut off does not count."""
    if not Path(file).exists():
        return []
    records = []
    for line in Path(file).read_text("utf-8").splitlines():
        try:
            records.append(Record(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            break
    return records
