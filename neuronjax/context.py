"""The settings under which a program is traced: lowering route, target, plain mode.

They live in one JAX user context, which is part of the key of `jax.jit`'s cache: a
function is traced again when they change, and nothing stale is ever reused.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax

ROUTES = ("inline", "composite")
TARGETS = ("gen2", "gen3", "gen4")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the rules read while a macro is traced or lowered."""

    route: str = "inline"
    target: str = "gen3"
    plain: bool = False
    fallback: bool = False
    # Called with each macro: family, flat operands, params, outputs.
    watch: Callable[..., None] | None = None


_context = jax.make_user_context(Settings())


def settings() -> Settings:
    """The settings in force here."""
    return _context.value


@contextlib.contextmanager
def _using(**changes) -> Iterator[None]:
    with _context(dataclasses.replace(_context.value, **changes)):
        yield


def lowering(route: str) -> contextlib.AbstractContextManager[None]:
    """Chooses how macros are lowered inside the `with` block.

    Args:
        route: `"inline"` (default) lowers a macro to a call of a function that carries
            its NAME; `"composite"` to a `stablehlo.composite` named `neuron.<NAME>`
            whose attributes are the config bag and whose decomposition is the leaf.

    Raises:
        ValueError: `route` is neither.

    Example:
        >>> import jax, jax.numpy as jnp, neuronjax
        >>> with neuronjax.lowering("composite"):
        ...     x = jnp.ones((64, 1, 1, 4))
        ...     cos = sin = jnp.ones((32, 1, 4))
        ...     text = jax.jit(neuronjax.RoPE).lower(x, cos, sin).as_text()
        >>> "neuron.RoPE" in text
        True
    """
    if route not in ROUTES:
        raise ValueError(f"lowering: route must be one of {ROUTES}, got {route!r}")
    return _using(route=route)


def target(generation: str) -> contextlib.AbstractContextManager[None]:
    """Chooses the chip whose limits and NAMEs hold inside the `with` block.

    Args:
        generation: `"gen2"`, `"gen3"` (default) or `"gen4"`.

    Raises:
        ValueError: `generation` is none of these.
    """
    if generation not in TARGETS:
        raise ValueError(
            f"target: generation must be one of {TARGETS}, got {generation!r}"
        )
    return _using(target=generation)


def fallback() -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block every macro is emitted as `BIRKernel`."""
    return _using(fallback=True)


def plain() -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block every macro runs its plain-jnp reference instead.

    No macro is bound and JAX differentiates the reference by itself. When a model goes
    wrong, run it so: if the fault stays, it is in the model; if not, in a kernel.
    """
    return _using(plain=True)


def watching(
    watch: Callable[..., None] | None,
) -> contextlib.AbstractContextManager[None]:
    """Inside the `with` block `watch` is told of every macro; `None` tells nobody."""
    return _using(watch=watch)
