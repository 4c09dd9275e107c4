"""What `check_transformations` answers."""

import dataclasses
import enum
from collections.abc import Callable


class State(enum.Enum):
    """How a cell ended."""

    GREEN = "green"
    REFUSED = "refused"
    RED = "red"
    NOT_RUN = "not run"


COLOURS = {
    State.GREEN: "green",
    State.REFUSED: "cyan",
    State.RED: "bold red",
    State.NOT_RUN: "yellow",
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One transformation of one NAME.

    Attributes:
        transformation: such as `"vmap of grad"`.
        state: green, refused as declared, red, or not run.
        detail: the reason of a refusal, the error of a red cell, what is missing for
            one that did not run; empty for a green one.
        seconds: how long it took.
        error: what a red cell raised.
    """

    transformation: str
    state: State
    detail: str = ""
    seconds: float = 0.0
    error: Exception | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class TransformationReport:
    """The column of one NAME in the transformation table; true when no cell is red.

    Attributes:
        name: the NAME, or the label of a variant.
        cells: in the order of the table.
    """

    name: str
    cells: tuple[Cell, ...]

    def __bool__(self) -> bool:
        return not self.of(State.RED)

    def __getitem__(self, transformation: str) -> Cell:
        """The cell of one transformation."""
        for cell in self.cells:
            if cell.transformation == transformation:
                return cell
        raise KeyError(transformation)

    def of(self, state: State) -> tuple[Cell, ...]:
        """The cells of one state."""
        return tuple(cell for cell in self.cells if cell.state is state)

    @property
    def summary(self) -> str:
        """How many cells ended how."""
        counts = [(state, len(self.of(state))) for state in State]
        return ", ".join(f"{n} {state.value}" for state, n in counts if n)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.summary}"]
        for cell in self.cells:
            if cell.state is not State.GREEN:
                told = f"  {cell.transformation}: {cell.state.value}: {cell.detail}"
                lines.append(told)
        return "\n".join(lines)

    def __rich__(self):
        """The table that `rich` prints."""
        from rich.markup import escape  # a picture only: `import neuronjax` stays quick
        from rich.table import Table

        table = Table(title=f"{self.name}: {self.summary}")
        for column in ("transformation", "result", "detail"):
            table.add_column(column, overflow="fold")
        table.add_column("s", justify="right")
        for cell in self.cells:
            colour = COLOURS[cell.state]
            result = f"[{colour}]{cell.state.value}[/{colour}]"
            seconds = f"{cell.seconds:.1f}" if cell.seconds else ""
            table.add_row(cell.transformation, result, escape(cell.detail), seconds)
        return table


Progress = Callable[[Cell], None]
