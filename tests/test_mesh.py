"""Meshes."""

import pytest
from jax.sharding import AxisType

from neuronjax.sharding.mesh import make_mesh


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_any_axis_size_makes_a_mesh(size):
    assert dict(make_mesh(tensor=size).shape) == {"tensor": size}


def test_the_cores_of_a_logical_core_are_the_last_axis():
    assert dict(make_mesh(data=3, lnc=2).shape) == {"data": 3, "lnc": 2}


def test_axes_are_auto_unless_asked_for_explicit():
    assert make_mesh(data=2).axis_types == (AxisType.Auto,)
    assert make_mesh(data=2, explicit=True).axis_types == (AxisType.Explicit,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(data=0), r"sizes must be positive, got \{'data': 0\}"),
        (dict(), "sizes must be positive, got none"),
        (dict(data=1, lnc=3), "lnc must be 1 or 2, got 3"),
        (dict(data=64), "need 64 devices, got 8"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(**sizes)
