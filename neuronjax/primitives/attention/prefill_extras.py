"""How the options of prefill attention become operands and settings of its macros."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def non_default(window: int | None, soft_cap: float | None) -> dict[str, Any]:
    """The settings that are not off."""
    options: dict[str, Any] = dict(window=int(window or 0), soft_cap=soft_cap or 0.0)
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
        bound = jnp.ceil(jax.lax.stop_gradient(bound))
        bound = jnp.where(jnp.isnan(bound), if_nan, bound)
    return jnp.clip(bound, 0, columns).astype(jnp.int32)


def as_mask(mask: Any) -> Array | None:
    """Nonzero = keep."""
    return None if mask is None else jnp.asarray(mask).astype(bool)


def as_position(x: Any) -> Array | None:
    """One int32, from an array that holds one integer."""
    return None if x is None else jnp.asarray(x).reshape(()).astype(jnp.int32)


def dropout_settings(rate: float, key: Any) -> tuple[Array | None, dict[str, Any]]:
    """The key as an operand, and the settings; nothing at rate 0."""
    if not rate:
        return None, {}
    key = jnp.asarray(key)
    settings: dict[str, Any] = dict(dropout_rate=float(rate))
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        settings["dropout_impl"] = str(jax.random.key_impl(key))
        key = jax.random.key_data(key)
    return key, settings
