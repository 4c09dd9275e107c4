"""One function, layer or state of another library."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Peer:
    """What another library calls the arguments of one of our functions.

    Attributes:
        name: where it is imported from, dotted; for a layer its constructor.
        ours: our function, or the layer `nn.<name>`.
        rows: `(theirs, ours, what to mind)`; names that go together stand in one row,
            with commas between them. An empty one of ours has no counterpart.
        note: what to mind of all of them.
        weights: `rows` are the names of a model's weights, not arguments.
        newer: arguments that the oldest supported version of the library lacks.
    """

    name: str
    ours: str
    rows: tuple[tuple[str, str, str], ...]
    note: str = ""
    weights: bool = False
    newer: tuple[str, ...] = ()
