"""How the options of prefill attention become operands and settings of its macros."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def non_default(window: int | None, soft_cap: float | None) -> dict[str, Any]:
    """The settings that are not off."""
    # No sequence reaches 2**30: a wider window hides as little.
    window = min(int(window or 0), 2**30)
    options: dict[str, Any] = dict(window=window, soft_cap=float(soft_cap or 0.0))
    return {key: value for key, value in options.items() if value}


def as_bounds(least: Any, most: Any, columns: int) -> tuple[Any, Any]:
    """Bounds as int32 `[q_seq]`; a NaN lets nothing be seen: comparisons with it fail.

    Column `j` is below 2.5 when it is below 3.
    """
    if least is None or most is None:
        return None, None
    return _bound(least, columns, columns), _bound(most, columns, 0)


def _bound(bound: Any, columns: int, if_nan: int) -> Array:
    bound = jnp.asarray(bound).reshape(-1)
    if jnp.issubdtype(bound.dtype, jnp.floating):
        bound = jnp.ceil(jax.lax.stop_gradient(bound).astype(jnp.float32))
        bound = jnp.where(jnp.isnan(bound), if_nan, bound)
        return jnp.clip(bound, 0, columns).astype(jnp.int32)
    # In its own width first: what does not fit there cannot be reached.
    bound = jnp.clip(bound, 0, min(columns, jnp.iinfo(bound.dtype).max))
    return bound.astype(jnp.int32)


def as_mask(mask: Any) -> Array | None:
    """Nonzero = keep."""
    return None if mask is None else jnp.asarray(mask).astype(bool)


def as_position(x: Any) -> Array | None:
    """One int32, from an array that holds one integer of any width.

    Beyond 2**30 a position sees what one at 2**30 sees.
    """
    if x is None:
        return None
    x, wide = jnp.asarray(x).reshape(()), 2**30
    held = jnp.iinfo(x.dtype)
    x = jnp.clip(x, max(held.min, -wide), min(held.max, wide))
    return x.astype(jnp.int32)


def head_keys(key: Array, heads: int) -> Array:
    """A key for each head: a weight is dropped by that, its position and its column."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim:
        return key
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    return fold(key, jnp.arange(heads, dtype=jnp.uint32))


def dropout_settings(rate: float, key: Any, heads: int) -> tuple[Any, dict[str, Any]]:
    """The keys of the heads as an operand, and the settings; nothing at rate 0."""
    if not rate:
        return None, {}
    keys = head_keys(jnp.asarray(key), heads)
    settings: dict[str, Any] = dict(dropout_rate=float(rate))
    settings["dropout_impl"] = str(jax.random.key_impl(keys))
    return jax.random.key_data(keys), settings
