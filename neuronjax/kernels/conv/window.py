"""Where the taps of a filter read: stride, padding, dilation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class Window(NamedTuple):
    """How a filter moves: tap `k` of result `l` reads position `l*stride + k*dilation`.

    Positions count from the first padded one.

    Attributes:
        stride: positions between neighbouring results.
        padding: zeros before and behind.
        dilation: positions between neighbouring taps.
    """

    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    dilation: int = 1

    def span(self, taps: int) -> int:
        """Positions from the first to the last tap."""
        return self.dilation * (taps - 1) + 1

    def results(self, length: Any, taps: int) -> Any:
        """How many results `length` positions give; at most 0 when no window fits."""
        return (length + sum(self.padding) - self.span(taps)) // self.stride + 1

    def padded(self, x: Float[Array, "*rows length"]) -> Float[Array, "*rows padded"]:
        """`x` with the zeros around it."""
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), self.padding])

    def tap(
        self, padded: Float[Array, "*rows padded"], tap: int, results: Any
    ) -> Float[Array, "*rows out"]:
        """What tap number `tap` reads for each result."""
        first = tap * self.dilation
        last = first + (results - 1) * self.stride + 1
        return lax.slice_in_dim(padded, first, last, self.stride, padded.ndim - 1)


def gathered(
    x: Float[Array, "*rows length"], taps: int, window: Window
) -> Float[Array, "*rows taps out"]:
    """Every tap of every result by its index, as the equation reads them."""
    results = window.results(x.shape[-1], taps)
    tap = jnp.arange(taps, dtype=jnp.int32)[:, None] * window.dilation
    position = tap + jnp.arange(results, dtype=jnp.int32) * window.stride
    return jnp.take(window.padded(x), position, axis=-1, mode="clip")
