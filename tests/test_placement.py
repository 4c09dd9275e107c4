"""Parameters go to the devices that their names say, where they divide."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from neuronjax.sharding.placement import fitting_spec, place


def make_mesh(size, name="tensor"):
    return jax.make_mesh((size,), (name,), axis_types=(AxisType.Auto,))


class Pair(nnx.Module):
    def __init__(self):
        wide, gain = jnp.ones((4, 6)), jnp.ones(6)
        names = (None, "tensor")
        self.wide = nnx.Param(wide, out_sharding=names, eager_sharding=False)
        self.gain = nnx.Param(gain)

    def __call__(self, x):
        return (x @ self.wide[...]) * self.gain[...]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, (None, "tensor")),
        (2, (None, "tensor")),
        (3, (None, "tensor")),
        (4, (None, None)),
    ],
)
def test_a_parameter_is_split_where_it_divides(size, expected):
    pair = Pair()
    x = jnp.arange(8.0).reshape(2, 4)
    before = pair(x)
    place(pair, make_mesh(size))
    assert pair.wide[...].sharding.spec == PartitionSpec(*expected)
    assert len(pair.gain[...].sharding.device_set) == size
    assert jnp.array_equal(nnx.jit(lambda m, x: m(x))(pair, x), before)


def test_a_name_that_the_mesh_lacks_is_dropped():
    mesh = make_mesh(2, "data")
    assert fitting_spec((4, 6), PartitionSpec("tensor", "data"), mesh) == PartitionSpec(
        None, "data"
    )


def test_an_axis_over_two_mesh_axes_needs_their_product_to_divide():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(("a", "b"))
    assert fitting_spec((8, 3), spec, mesh) == PartitionSpec(("a", "b"), None)
    assert fitting_spec((6, 3), spec, mesh) == PartitionSpec(None, None)
