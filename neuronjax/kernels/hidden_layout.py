"""The three ways in which hidden channels lie on 128 partitions: `[128, tokens, C]`.

Channel `h` of a token lies at `[p, t, c]`, `C = H / 128`:

- `contiguous`: `h = p * C + c`;
- `halves`: two cores hold half of the channels each, contiguous: `h = half * H/2 +
  p * C/2 + c mod C/2`, `half = c // (C/2)`;
- `strided`: `h = c * 128 + p`.
"""

import jax
from jaxtyping import Array, Shaped

PARTITIONS = 128
LAYOUTS = ("contiguous", "halves", "strided")


def to_partitions(
    rows: Shaped[Array, "tokens d_model"], layout: str
) -> Shaped[Array, "128 tokens _"]:
    """Lays the channels of `[T, H]` on the partitions."""
    tokens, width = rows.shape
    chunks = width // PARTITIONS
    if layout == "contiguous":
        return rows.reshape(tokens, PARTITIONS, chunks).transpose(1, 0, 2)
    if layout == "strided":
        return rows.reshape(tokens, chunks, PARTITIONS).transpose(2, 0, 1)
    split = rows.reshape(tokens, 2, PARTITIONS, chunks // 2).transpose(2, 0, 1, 3)
    return split.reshape(PARTITIONS, tokens, chunks)


def from_partitions(
    x: Shaped[Array, "128 tokens _"], layout: str
) -> Shaped[Array, "tokens d_model"]:
    """The `[T, H]` that `to_partitions` was given."""
    _, tokens, chunks = x.shape
    width = PARTITIONS * chunks
    if layout == "contiguous":
        return x.transpose(1, 0, 2).reshape(tokens, width)
    if layout == "strided":
        return x.transpose(1, 2, 0).reshape(tokens, width)
    split: jax.Array = x.reshape(PARTITIONS, tokens, 2, chunks // 2)
    return split.transpose(1, 2, 0, 3).reshape(tokens, width)
