"""The decode block over two cores that project to columns of their own."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.emit import attention_block_tkg_kernel
from neuronjax.sharding.mesh import make_mesh
from tests import hlo
from tests.attention_block_case import operands, sizes

OPTIONS = dict(rmsnorm_X_enabled=True, rmsnorm_QK_pre_rope_enabled=True)
FLOATS = ("X", "W_qkv", "rmsnorm_X_gamma", "cos", "K_cache", "V_cache", "W_out", "sink")


def _arrays(dtype="float32"):
    arrays = operands(sizes(), OPTIONS, dtype=dtype)
    return {k: x for k, x in arrays.items() if k != "bias_out"}


def _over_cores(arrays):
    """The block with `W_out` in halves of its columns: `X_out` alike."""
    specs = {k: P(None, "lnc") if k == "W_out" else P() for k in arrays}

    def local(arrays):
        return attention_block_tkg_kernel(**arrays, **OPTIONS, lnc_axis="lnc")

    return jax.shard_map(
        local,
        mesh=make_mesh(lnc=2, tensor=1),
        in_specs=(specs,),
        out_specs=(P(None, "lnc"), P(), P()),
    )(arrays)


def _on_one(arrays):
    return attention_block_tkg_kernel(**arrays, **OPTIONS)


def _gradients(run, arrays):
    def loss(live):
        outs = run(arrays | live)
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in outs)

    return jax.jit(jax.grad(loss))({k: arrays[k] for k in FLOATS})


@pytest.mark.parametrize("is_plain", [False, True])
def test_cores_give_the_columns_of_one_device(is_plain):
    arrays = _arrays()
    with neuronjax.plain() if is_plain else contextlib.nullcontext():
        got = jax.jit(_over_cores)(arrays)
        grads = _gradients(_over_cores, arrays)
    wanted = _on_one(arrays)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for name, x in _gradients(_on_one, arrays).items():
        assert np.abs(grads[name] - x).max() <= 2e-5 * np.abs(x).max(), name


def test_the_caches_are_typed_alike_and_nothing_is_exchanged_for_them():
    arrays = _arrays()
    assert hlo.collectives(_over_cores, arrays) == {}


def test_the_backward_sums_the_heads_once():
    """Each core has a part of the cotangent of the heads: one sum, no other."""
    arrays = _arrays()
    found = hlo.collectives(lambda a: _gradients(_over_cores, a), arrays)
    assert found == {"all-reduce": 1}


def test_some_columns_of_a_projection_are_those_columns():
    arrays = _arrays()
    whole = _on_one(arrays)[0]
    some = _on_one(arrays | dict(W_out=arrays["W_out"][:, 1:4]))[0]
    np.testing.assert_allclose(some, whole[:, 1:4], rtol=1e-5, atol=1e-6)


def test_the_public_function_takes_all_columns():
    arrays = _arrays()
    arrays["W_out"] = arrays["W_out"][:, 1:4]
    with pytest.raises(ValueError, match=r"W_out must have shape \(N\*D, H\)"):
        neuronjax.attention_block_tkg(**arrays, **OPTIONS)
