"""Tiles: layout, round trips, budgets, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import MemrefTile
from neuronjax.primitives import tile


@pytest.mark.parametrize("shape", [(256, 3), (3, 128), (5, 7, 384), (1, 1)])
def test_a_tile_returns_its_tensor(shape):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    for axis, size in enumerate(shape):
        laid = MemrefTile.from_tensor(x, axis)
        assert laid.data.shape[0] == min(size, 128)
        assert laid.shape == shape
        np.testing.assert_array_equal(laid.to_tensor(), x)


def test_element_n_lies_in_partition_n_over_c():
    data = MemrefTile.from_tensor(jnp.arange(384), 0).data
    assert data[5, 2] == 5 * 3 + 2


@pytest.mark.parametrize(("size", "nearest"), [(130, 128), (200, 256), (0, 1)])
def test_an_axis_that_does_not_fill_partitions_is_refused(size, nearest):
    message = f"axis 0 of x .* nearest size that fits: {nearest}$"
    with pytest.raises(ValueError, match=message):
        MemrefTile.from_tensor(jnp.zeros((size, 2)), 0)
    MemrefTile.from_tensor(jnp.zeros((nearest, 2)), 0)


def test_bad_axis_and_buffer_are_refused():
    with pytest.raises(ValueError, match="axis must lie in"):
        MemrefTile.from_tensor(jnp.zeros(3), 1)
    with pytest.raises(ValueError, match="buffer must be one of"):
        MemrefTile.from_tensor(jnp.zeros(3), 0, buffer="hbm")


def test_tiles_map_differentiate_and_jit():
    x = jnp.arange(12.0).reshape(3, 4)

    @jax.jit
    def total(x):
        return jax.vmap(lambda r: MemrefTile.from_tensor(r, 0))(x).data.sum()

    np.testing.assert_array_equal(jax.grad(total)(x), jnp.ones((3, 4)))


def test_all_none_and_mixed_are_told_apart():
    x = jnp.zeros(4)
    t = MemrefTile.from_tensor(x)
    assert neuronjax.is_all_io_type_memref_tile((t, t, None), "mlp_kernel")
    assert not neuronjax.is_all_io_type_memref_tile((x, None), "mlp_kernel")
    message = (
        "Inputs/outputs to mlp_kernel must be all tensors or all tiles, "
        "not a mix of both"
    )
    with pytest.raises(ValueError) as refusal:
        neuronjax.is_all_io_type_memref_tile((t, x), "mlp_kernel")
    assert str(refusal.value) == message


def test_a_tile_that_does_not_fit_says_how_much_was_asked():
    big = MemrefTile.from_tensor(jnp.zeros((128, 50_000)), 0)
    message = "SBUF of gen3: 196608 bytes a partition, got 200000"
    with pytest.raises(ValueError, match=message):
        tile.require_fit("mlp_kernel", hidden=big)
    with neuronjax.target("gen4"):
        tile.require_fit("mlp_kernel", hidden=big)
    small = MemrefTile.from_tensor(jnp.zeros((128, 5_000)), 0, buffer="psum")
    with pytest.raises(ValueError, match="PSUM of gen3: 16384 bytes"):
        tile.require_fit("mlp_kernel", hidden=small)


def test_unknown_target_and_route_are_refused():
    with pytest.raises(ValueError, match="target: generation must be one of"):
        neuronjax.target("gen5")
    with pytest.raises(ValueError, match="lowering: route must be one of"):
        neuronjax.lowering("magic")
