"""What the emitters of the probes share: operands, tiles, and one macro."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.primitives.probes.macro import FAMILIES, placed
from neuronjax.primitives.probes.plan import pair_of, pairs_of
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

Operand = Array | MemrefTile


def emit_probe(
    emitter: str,
    name: str,
    operands: tuple[Any, Any, Any],
    sizes: tuple[Any, Any, int],
    size: Any,
    where: Any,
    **config: Any,
) -> Operand:
    """Binds the macro NAME.

    Args:
        emitter: whose call it is.
        name: the NAME.
        operands: stationary, moving, and what PSUM holds or None.
        sizes: rows, columns and how many tiles there are.
        size: of a band, if one is named.
        where: its positions, if they are named.
        **config: what else the config bag has.
    """
    is_tiled = is_all_io_type_memref_tile(operands, emitter)
    psum = operands[2]
    config |= placed(name, *sizes, pair_of(size), pairs_of(where))
    config |= dict(is_tiled=is_tiled, psum="start" if psum is None else "add")
    family = FAMILIES[name]
    if not is_tiled:
        given = [None if x is None else jnp.asarray(x) for x in operands]
        return family(*given, name=name, **config)[0]
    tiles = dict(zip(("stationary", "moving", "psum"), operands, strict=True))
    require_partitions(emitter, **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    out = MemrefTile(family(*data, name=name, **config)[0], operands[1].axis, "psum")
    # A group that goes on adds where its sums lie: they need no second place.
    require_fit(emitter, stationary=operands[0], moving=operands[1], out=out)
    return out
