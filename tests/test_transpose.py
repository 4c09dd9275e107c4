"""Transposes of tensors and tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import MemrefTile
from neuronjax.emit import transpose_kernel


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 130), (2, 1, 3, 1), (0, 3), (1, 7)])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "bool", "float8_e4m3"]
)
def test_the_last_two_axes_change_places(shape, dtype):
    x = jnp.asarray(_draw(*shape) * 3).astype(dtype)
    got = neuronjax.transpose(x)
    assert got.dtype == x.dtype
    wanted = np.moveaxis(np.asarray(x.astype("float32")), -1, -2)
    np.testing.assert_array_equal(got.astype("float32"), wanted)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "shape", [(3, 5), (256, 3), (3, 256), (256, 384), (2, 128, 7), (2, 3, 256, 5)]
)
def test_a_tile_of_the_transposed_tensor(shape, axis):
    """Element (j, i) lies where the rule `n = p*C + c` of tiles puts it."""
    x = _draw(*shape)
    tile = MemrefTile.from_tensor(jnp.asarray(x), axis)
    got = neuronjax.transpose(tile)
    wanted = MemrefTile.from_tensor(jnp.asarray(x).swapaxes(-1, -2), axis)
    assert (got.axis, got.buffer) == (wanted.axis, "sbuf")
    np.testing.assert_array_equal(got.data, wanted.data)
    np.testing.assert_array_equal(got.to_tensor(), np.swapaxes(x, -1, -2))


def test_partitions_and_free_elements_change_places():
    """Partition p, chunk c of 2: row 2p + c becomes the free element of that index."""
    data = np.zeros((128, 2, 3), np.float32)
    data[5, 1, 2] = 1
    got = neuronjax.transpose(MemrefTile(jnp.asarray(data), 0))
    assert np.argwhere(np.asarray(got.data)).tolist() == [[2, 0, 11]]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: MemrefTile.from_tensor(x, 0)])
def test_derivatives_of_every_order_are_transposes(wrap):
    def cubed(x):
        out = neuronjax.transpose(wrap(x))
        return (out.data if isinstance(out, MemrefTile) else out) ** 3

    with jax.enable_x64(True):
        x = jnp.asarray(_draw(4, 3), "float64")
        check_grads(jax.jit(cubed), (x,), 3, modes=["fwd", "rev"])


def test_the_gradient_is_the_same_macro():
    x = jnp.asarray(_draw(256, 3))
    for wrap in (lambda x: x, lambda x: MemrefTile.from_tensor(x, 0)):

        def loss(x, wrap=wrap):
            return sum(map(jnp.sum, jax.tree.leaves(neuronjax.transpose(wrap(x)))))

        seen = neuronjax.trace(jax.grad(loss), x)
        assert seen.count("Transpose") == 2 and seen.names == ("Transpose",)
        np.testing.assert_array_equal(jax.grad(loss)(x), jnp.ones_like(x))


def test_a_tile_made_by_hand_gets_a_gradient_of_its_own_shape():
    tile = MemrefTile(jnp.asarray(_draw(4, 2, 3)), 0)
    grad = jax.grad(lambda t: (neuronjax.transpose(t).data ** 2).sum())(tile)
    np.testing.assert_allclose(grad.data, 2 * tile.data)


def test_the_tiled_leaf_never_holds_the_whole_tensor():
    tile = MemrefTile.from_tensor(jnp.asarray(_draw(3, 256, 5)), 1)
    jaxpr = jax.make_jaxpr(lambda d: neuronjax.transpose(MemrefTile(d, 1)).data)(
        tile.data
    )
    whole = {(3, 256, 5), (3, 5, 256)}
    inside = [eqn for eqn in _equations(jaxpr.jaxpr)]
    assert {"reshape", "transpose"} <= {eqn.primitive.name for eqn in inside}
    assert not any(v.aval.shape in whole for eqn in inside for v in eqn.outvars)


def _equations(jaxpr):
    """All equations, those of the leaf included."""
    from neuronjax.primitives.transpose import transpose_family

    for eqn in jaxpr.eqns:
        if eqn.primitive is transpose_family.macro_p:
            call = transpose_family.static_call(**eqn.params)
            inner = jax.make_jaxpr(call)(*[v.aval for v in eqn.invars])
            yield from _equations(inner.jaxpr)
        elif "jaxpr" in eqn.params:
            yield from _equations(eqn.params["jaxpr"].jaxpr)
        else:
            yield eqn


def test_tiles_that_do_not_fit_are_refused():
    wide = MemrefTile(jnp.zeros((128, 1, 128 * 200)), 0)
    with pytest.raises(ValueError, match="transpose_kernel: tiles must fit SBUF"):
        neuronjax.transpose(wide)
    with pytest.raises(ValueError, match="x must have at most 128 partitions"):
        neuronjax.transpose(MemrefTile(jnp.zeros((256, 1, 3)), 0))


def test_an_unknown_keyword_of_the_emitter_is_refused():
    with pytest.raises(ValueError, match="'perm' is neither an option nor a hint"):
        transpose_kernel(jnp.ones((2, 3)), perm=(1, 0))


def test_twice_is_nothing():
    x = jnp.asarray(_draw(2, 5, 7))
    np.testing.assert_array_equal(neuronjax.transpose(neuronjax.transpose(x)), x)
