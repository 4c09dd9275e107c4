"""Which axes of a convolution an explicit mesh may divide."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax


def typed(leaf: Callable[..., tuple]) -> Callable[..., tuple]:
    """The leaf of `Conv1D`, refusing what an explicit mesh cannot type.

    The convolution sums over C_in and the taps: divided, the sum's layout would have to
    be named. Positions divide where the result's divide alike, in form "fast".

    Raises:
        NotImplementedError: C_in or the taps are divided, L into parts that the result
            does not have, or the bias otherwise than C_out of the filters.
    """

    @functools.wraps(leaf)
    def checked(x, filters, bias, *rest: Any, name: str, **config: Any) -> tuple:
        odd = _odd(x, filters, bias, **config)
        if odd:
            raise NotImplementedError(
                f"{name}: an explicit mesh may divide the batch and C_out, not {odd}: "
                "reshard it, or call neuronjax.sharding.sharded_conv1d"
            )
        return leaf(x, filters, bias, *rest, name=name, **config)

    return checked


def _odd(x, filters, bias, *, stride, padding, dilation, **config: Any) -> str:
    """What is divided and may not be, described."""
    spec, of_filters = _spec(x), _spec(filters)
    if spec[1] or of_filters[1]:
        return "C_in"
    if of_filters[0]:
        return "the taps"
    if bias is not None and _spec(bias)[0] != of_filters[2]:
        return "a bias otherwise than C_out of the filters"
    if spec[2] is None:
        return ""
    parts, reach = _parts(x, spec[2]), dilation * (filters.shape[0] - 1)
    out = (x.shape[2] + sum(padding) - reach - 1) // stride + 1
    if config["form"] != "fast" or out % parts:
        return f"L = {x.shape[2]} into {parts} parts"
    return ""


def _parts(x: jax.Array, axes: Any) -> int:
    """Into how many parts these axes of the mesh divide an axis of `x`."""
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)


def _spec(x: jax.Array) -> tuple[Any, ...]:
    """For each axis of `x` the axes of the mesh that divide it, or None."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *[None] * (x.ndim - len(spec)))
