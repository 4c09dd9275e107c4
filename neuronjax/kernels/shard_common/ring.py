"""The permute ring: what every rank holds reaches every other, one neighbour at a time.

`size - 1` permutes, whatever the size. One way, a chunk makes up to `size - 1` hops;
both ways it starts out in two directions and makes half as many in each.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax import lax

from neuronjax.kernels.shard_common.groups import Group, group_size, own_rank


class Step(NamedTuple):
    """What a rank works on: the chunk that came `hops` ranks far.

    Attributes:
        hops: how many permutes it has behind it.
        direction: +1 if it moves to the next rank at each, -1 to the one before.
    """

    hops: int
    direction: int


def steps(size: int, bidirectional: bool = False) -> tuple[Step, ...]:
    """The `size` steps of a ring in order; step 0 is a rank's own chunk.

    Example:
        >>> [step.hops * step.direction for step in steps(5, bidirectional=True)]
        [0, 1, -1, 2, -2]
    """
    if not bidirectional:
        return tuple(Step(hops, 1) for hops in range(size))
    there = [Step(hops, 1) for hops in range(size // 2 + 1)]
    back = [Step(hops, -1) for hops in range(1, (size + 1) // 2)]
    return tuple(sorted(there + back, key=lambda step: (step.hops, -step.direction)))


def current_processing_rank_id(
    step: int, channel: int, group: Group, *, bidirectional: bool = False
) -> jax.Array | int:
    """The rank whose chunk this device works on at `step`.

    Args:
        step: from 0 to the size of the group.
        channel: which of the rings; all of them turn alike.
        group: who is in the ring.
        bidirectional: whether chunks travel both ways.
    """
    del channel
    size = group_size(group)
    hops, direction = steps(size, bidirectional)[step]
    return (own_rank(group) - direction * hops) % size


def arriving(
    chunk: jax.Array, group: Group, *, channel: int = 0, bidirectional: bool = False
) -> Iterator[tuple[jax.Array | int, jax.Array]]:
    """Hands out `(rank, chunk of that rank)`, one a step.

    Double-buffered: a chunk is on its way to the next rank before it is handed out.
    """
    order = steps(group_size(group), bidirectional)
    held = {order[0]: chunk}
    for i, step in enumerate(order):
        here = held.pop(step)
        for later in _sent_from(step, order):
            held[later] = _shifted(here, group, later.direction)
        rank = current_processing_rank_id(
            i, channel, group, bidirectional=bidirectional
        )
        yield rank, here


def reduced(
    part: Callable[[jax.Array | int], jax.Array],
    group: Group,
    *,
    bidirectional: bool = False,
) -> jax.Array:
    """The sum over ranks of `part(rank of this device)`: `arriving` turned around.

    A sum starts far from its owner and collects a part at each rank on its way. Only
    the parts can be computed while it travels.

    Args:
        part: what this device adds to the sum that the given rank owns.
        group: who is in the ring.
        bidirectional: whether sums travel both ways.
    """
    size, me = group_size(group), own_rank(group)
    farthest = {
        step.direction: step.hops for step in steps(size, bidirectional) if step.hops
    }
    total = part(me)
    for direction, hops in farthest.items():
        moving = part((me + direction * hops) % size)
        for left in reversed(range(hops)):
            moving = _shifted(moving, group, direction)
            if left:
                moving = moving + part((me + direction * left) % size)
        total = total + moving
    return total


def _sent_from(step: Step, order: tuple[Step, ...]) -> list[Step]:
    """The steps that receive what `step` holds; the own chunk may leave both ways."""
    ways = {step.direction} if step.hops else {1, -1}
    return [s for s in order if s.hops == step.hops + 1 and s.direction in ways]


def _shifted(x: jax.Array, group: Group, direction: int) -> jax.Array:
    """`x` of the neighbour, by one permute."""
    assert group.axis is not None
    whole = tuple(range(lax.axis_size(group.axis)))
    pairs = [
        (ranks[i], ranks[(i + direction) % len(ranks)])
        for ranks in group.members or (whole,)
        for i in range(len(ranks))
    ]
    return lax.ppermute(x, group.axis, pairs)
