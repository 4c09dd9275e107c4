"""What no query sees does not reach a result of `transformer_tkg`, were it NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests import transformer_case as case
from tests.transformer_case import on_mesh, operands, sizes

HIDDEN = [0, 2, 5, 6, 7, 8]  # of nine slots: two that the mask hides, four beyond it
CACHES = dict(K_caches=3, V_caches=2)  # and the axis of their slots


def _calls(**changes):
    """A call whose hidden slots hold zeros, and the same with NaN there."""
    call = operands(sizes(**changes))
    at = jnp.asarray(HIDDEN, jnp.int32)
    call["mask_cache"] = call["mask_cache"].at[at[:2]].set(0).at[1].set(1)
    call["position_ids"] = jnp.full_like(call["position_ids"], 6)

    def filled(value):
        index = dict(K_caches=np.s_[..., at], V_caches=np.s_[..., at, :])
        return call | {k: [x.at[index[k]].set(value) for x in call[k]] for k in CACHES}

    return filled(0.0), filled(jnp.nan)


def _output_and_gradients(call):
    arrays, rest = case.split(call)
    held = {k: arrays.pop(k) for k in ("mask_cache", "position_ids")}

    def loss(live):
        out, *caches = neuronjax.transformer_tkg(**live, **held, **rest)
        written = [x[..., 6:8] for x in caches[0]]
        written += [x[..., 6:8, :] for x in caches[1]]
        return jnp.sin(out).sum() + sum((x**2).sum() for x in written), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_hidden_slots_reach_no_output_and_no_gradient(groups, stacked):
    clean, dirty = (
        _output_and_gradients(case.stacked(call) if stacked else call)
        for call in _calls(G=groups)
    )
    for a, b in zip(*map(jax.tree.leaves, (clean, dirty)), strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_bad_slot_of_one_rank_reaches_no_cache_of_another(stacked):
    """The sum over ranks is bad then, and so is what later layers write."""
    clean, _ = _calls(L=1)
    clean = case.stacked(clean) if stacked else clean

    def bad(x):
        return x.at[..., 0, :, :].set(jnp.nan)

    dirty = clean | {k: jax.tree.map(bad, clean[k]) for k in CACHES}

    def run(call):
        arrays, rest = case.split(call)
        return jax.jit(lambda arrays: on_mesh(arrays, rest, tensor=2))(arrays)

    (_, *wanted), (output, *found) = run(clean), run(dirty)
    assert np.isnan(output).all()
    for a, b in zip(*map(jax.tree.leaves, (wanted, found)), strict=True):
        np.testing.assert_array_equal(a[..., 1, :, :], b[..., 1, :, :])
