"""Memory of `transformer_tkg`: donated caches and stacked weights are not copied."""

import jax
import jax.numpy as jnp
import pytest

import neuronjax
from neuronjax.kernels.stacked import layer_at
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_a_loop_over_layers_widens_one_narrow_layer_at_a_time(dtype):
    """A scan over the stack itself takes 2.3 to 2.5 times its bytes."""

    def run(stack, h):
        def body(h, i):
            return h @ layer_at(stack, i).astype(h.dtype), None

        return jax.lax.scan(body, h, jnp.arange(8, dtype=jnp.int32))[0]

    stack = jax.ShapeDtypeStruct((8, 256, 256), dtype)
    h = jax.ShapeDtypeStruct((1, 256), jnp.bfloat16)
    memory = jax.jit(run).lower(stack, h).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 256 * 256 * 4
