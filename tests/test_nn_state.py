"""State of layers through files, through graphs, and on a mesh by partition names."""

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from tests.nn_case import CASES


def test_a_state_comes_back_from_a_checkpoint(tmp_path):
    """Parameters, and what is none: the bias of a router's selection."""
    case = CASES["Router"]
    layer = case.layer()
    layer.selection_bias[...] = jax.numpy.array([0.5, -0.5, 0.25, 0.0])
    state = nnx.state(layer)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", nnx.to_pure_dict(state))
    abstract = nnx.eval_shape(case.make_new)
    shapes = nnx.to_pure_dict(nnx.state(abstract))
    with ocp.StandardCheckpointer() as reader:
        held = reader.restore(tmp_path / "state", shapes)
    restored = case.make_new()
    assert not np.array_equal(restored(*case.inputs)[0], layer(*case.inputs)[0])
    own = nnx.state(restored)
    nnx.replace_by_pure_dict(own, held)
    nnx.update(restored, own)
    for got, wanted in zip(restored(*case.inputs), layer(*case.inputs), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_partition_names_place_a_state():
    """An Auto mesh with every axis that names say: the same result, weights divided."""
    devices = jax.devices()[:4]
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("tensor", "expert"), kinds, devices=devices)
    for name in ("QKV", "MoE"):
        case = CASES[name]
        graph, state = nnx.split(case.layer())
        specs = nnx.get_partition_spec(state)
        placed = jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs
        )
        assert any(
            not x.sharding.is_fully_replicated for x in jax.tree.leaves(placed)
        ), name
        call = jax.jit(lambda s, *i, g=graph, c=case: c.call(nnx.merge(g, s), *i))
        got, wanted = call(placed, *case.inputs), call(state, *case.inputs)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
