"""NumPy's True and False, which comparisons give, switch as Python's do."""

import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.primitives.probes.tiled import row_tiled_mm_kernel

ON, OFF = np.bool_(True), np.bool_(False)


def test_an_option_of_caches_that_is_off_asks_for_none():
    x, weight = jnp.ones((1, 3, 4)), jnp.ones((4, 6))
    out = neuronjax.qkv(x, weight, use_block_kv=OFF)
    np.testing.assert_array_equal(out, neuronjax.qkv(x, weight))


def test_a_scale_of_kept_axes_fits_them():
    x, scale = jnp.ones((2, 3)), jnp.full((2, 1), 2.0)
    out = neuronjax.reduce(x, "add", 1, scale=scale, keepdims=ON)
    np.testing.assert_array_equal(out, jnp.full((2, 1), 6.0))
    with pytest.raises(ValueError, match="^reduce: scale"):
        neuronjax.reduce(x, "add", 1, scale=scale, keepdims=OFF)


def test_a_transposed_tile_adds_to_a_transposed_sum():
    stationary, moving = jnp.ones((4, 32, 3)), jnp.ones((4, 32, 5))
    psum = jnp.ones((4, 5, 3))
    out = row_tiled_mm_kernel(stationary, moving, psum, transpose=ON)
    np.testing.assert_array_equal(out, jnp.full((4, 5, 3), 33.0))
