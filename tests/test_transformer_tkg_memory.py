"""Donated caches of `transformer_tkg` are updated in place: no copy of one is made."""

import jax
import pytest

import neuronjax
from tests import transformer_case as case
from tests.transformer_case import on_mesh, operands, sizes

LONG = sizes(S=1, n=1, D=16, slots=4096, ctx=32)


def _require_in_place(step, call, *, ranks=1):
    """Its temporary memory is less than a third of the caches: than either of them."""
    arrays, _ = case.split(call)
    held = {k: arrays.pop(k) for k in ("K_caches", "V_caches")}
    compiled = jax.jit(step, donate_argnums=0).lower(held, arrays).compile()
    size = sum(x.nbytes for x in jax.tree.leaves(held)) // ranks
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 3


def _call(dtype, stacked, **changes):
    call = operands(LONG | changes, dtype=dtype)
    return case.stacked(call) if stacked else call


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_copies_no_donated_cache(dtype, batch, groups, stacked):
    call = _call(dtype, stacked, B=batch, G=groups)
    _, rest = case.split(call)

    def step(held, arrays):
        return neuronjax.transformer_tkg(**held, **arrays, **rest)

    _require_in_place(step, call)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("lnc", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_a_step_over_ranks_copies_none_either(lnc, dtype, stacked):
    """Each rank has one key/value head, two new tokens and two sequences."""
    call = _call(dtype, stacked, B=2, G=2, S=2)
    _, rest = case.split(call)

    def step(held, arrays):
        return on_mesh(held | arrays, rest, tensor=2, lnc=lnc)

    _require_in_place(step, call, ranks=2)
