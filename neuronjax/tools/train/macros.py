"""The macros that one training step runs."""

import jax
import jax.numpy as jnp
from rich.table import Table

from neuronjax.tools.trace import Trace, trace
from neuronjax.tools.train.blueprint import Blueprint
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.stepping import Stepping


def step_macros(config: TrainConfig, *, spread: bool = True) -> Trace:
    """The macros of the gradient of one step, from shapes alone.

    Args:
        config: of the run.
        spread: over its mesh; counts inside are then those of one device.
    """
    stepping = Stepping(Blueprint(config, spread=spread))
    shape = config.batch, config.seq + 1
    windows = jax.ShapeDtypeStruct(shape, jnp.int32)
    return trace(stepping.gradient, stepping.blueprint.shapes, windows)


def macro_table(config: TrainConfig) -> Table:
    """The same by NAME: how often each runs in a step, and its products."""
    rows: dict[str, list[float]] = {}
    for row in step_macros(config, spread=False).rows:
        count, flops = rows.setdefault(row.name, [0, 0.0])
        rows[row.name] = [count + row.count, flops + row.count * row.flops]
    table = Table(title="Macros of one step, forwards and backwards")
    table.add_column("NAME")
    for name in ("runs", "MFLOP"):
        table.add_column(name, justify="right")
    for name, (count, flops) in rows.items():
        table.add_row(name, f"{count:.0f}", f"{flops / 1e6:,.0f}")
    return table
