"""Prefill attention under transformations, with a traced scale, and over a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.emit import (
    attention_kernel,
)
from neuronjax.kernels.attention.options import Extras
from neuronjax.primitives import registry
from neuronjax.sharding.attention import sharded_attention
from neuronjax.sharding.mesh import make_mesh
from tests.attention_equations import gradients, visible
from tests.hlo import collectives
from tests.prefill_case import BACKWARD, CAUSAL, draw


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0), (1, 0, None)])
def test_vmap_with_some_operands_unbatched(dims):
    """R-42: equal to a loop; an unmapped operand gets an unmapped, summed gradient."""
    q, k, v = draw(3, 4)
    run = functools.partial(neuronjax.attention_cte, tp_k=True)
    stacked = [
        x if dim is None else jnp.stack([x, x / 2, -x], dim)
        for x, dim in zip((q, k, v), dims, strict=True)
    ]
    each = [
        [
            x if dim is None else jnp.take(x, i, dim)
            for x, dim in zip(stacked, dims, strict=True)
        ]
        for i in range(3)
    ]
    mapped = jax.vmap(run, dims)
    np.testing.assert_allclose(
        mapped(*stacked), jnp.stack([run(*x) for x in each]), rtol=1e-5, atol=1e-6
    )
    loss = jax.grad(lambda *a: jnp.sin(mapped(*a)).sum(), (0, 1, 2))
    single = jax.grad(lambda *a: jnp.sin(run(*a)).sum(), (0, 1, 2))
    parts = zip(*(single(*x) for x in each), strict=True)
    for got, part, dim in zip(loss(*stacked), parts, dims, strict=True):
        wanted = sum(part) if dim is None else jnp.stack(part, dim)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert neuronjax.trace(mapped, *stacked).count(CAUSAL) == 1


def test_a_mask_is_an_operand_under_scan_and_grad():
    """R-44, R-45: two scan steps with an array as mask; its gradient is float0."""
    q, k, v = draw(3, 4)
    masks = jnp.stack([jnp.ones((1, 3, 4), bool), jnp.tri(3, 4, dtype=bool)[None]])

    def attended(q, masks):
        def step(total, mask):
            out = attention_kernel(q, k.mT, v, mask, tp_q=True)
            return total + out.sum(), None

        return jax.lax.scan(step, 0.0, masks)[0]

    got, none = jax.grad(attended, (0, 1), allow_int=True)(q, masks)
    assert none.dtype == jax.dtypes.float0
    ones = np.ones((6, 3, 6))
    wanted = [gradients(q, k, v, visible(3, 4, c, heads=6), ones)[0] for c in (0, 1)]
    np.testing.assert_allclose(got, sum(wanted), rtol=1e-4, atol=1e-5)


def test_the_config_bag_takes_no_arrays():
    """R-44: the message names the argument."""
    family = registry.resolve_family(CAUSAL)
    with pytest.raises(ValueError, match=f"{CAUSAL}: scale must be a hashable"):
        family(*draw(2, 2), Extras(), name=CAUSAL, scale=np.ones(2))


@pytest.mark.parametrize("saved", [True, False])
def test_named_residuals_let_remat_run_the_forward_once(saved):
    """R-46: the checkpoint names of the docstring."""
    q, k, v = draw(3, 3)
    names = "attention_out", "attention_neg_max", "attention_recip"
    policy = jax.checkpoint_policies.save_only_these_names(*names if saved else ())
    run = jax.checkpoint(
        lambda *a: neuronjax.attention_cte(*a, tp_k=True).sum(), policy=policy
    )
    traced = neuronjax.trace(jax.grad(run, (0, 1, 2)), q, k, v)
    assert traced.count(CAUSAL) == (1 if saved else 2)
    assert traced.count(BACKWARD) == 1


@pytest.mark.parametrize("x64", [False, True])
def test_no_form_of_scale_changes_the_dtype(x64):
    """R-48: Python and NumPy numbers and JAX scalars; one program for numbers."""
    with jax.enable_x64(x64):
        q, k, v = draw(3, 3, dtype=jnp.bfloat16)

        def run(scale):
            return functools.partial(neuronjax.attention_cte, tp_k=True, scale=scale)

        numbers = [0.5, np.float64(0.5), np.float32(0.5)]
        texts = {jax.jit(run(s)).lower(q, k, v).as_text() for s in numbers}
        assert len(texts) == 1
        forms = [*numbers, 2, jnp.float32(0.5), jnp.asarray(0.5), jnp.bfloat16(0.5)]
        for scale in forms:
            out, pull = jax.vjp(run(scale), q, k, v)
            grads = pull(jnp.ones_like(out))
            assert {x.dtype for x in (out, *grads)} == {jnp.dtype("bfloat16")}


def test_a_traced_scale_has_a_gradient():
    q, k, v = draw(3, 3)
    run = functools.partial(neuronjax.attention_cte, q, k, v, tp_k=True)
    got = jax.grad(lambda s: jnp.sin(run(scale=s)).sum())(0.5)
    wanted = (jnp.sin(run(scale=0.505)).sum() - jnp.sin(run(scale=0.495)).sum()) / 0.01
    np.testing.assert_allclose(got, wanted, rtol=1e-2)


@pytest.mark.parametrize("sizes", [dict(data=2, tensor=2), dict(tensor=3)])
def test_attention_over_a_mesh_moves_nothing(sizes):
    q, k, v = draw(5, 7, heads=24, kv_heads=12)
    q, k, v = (x.reshape(2, -1, *x.shape[1:]) for x in (q, k.mT, v))
    batch = "data" if "data" in sizes else None
    run = functools.partial(sharded_attention, make_mesh(**sizes), batch=batch)
    folded = (jax.lax.collapse(x, 0, 2) for x in (q, k, v))
    wanted = neuronjax.attention_cte(*folded).reshape(2, 12, 5, 6)
    np.testing.assert_allclose(jax.jit(run)(q, k, v), wanted, rtol=1e-5, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda *a: jnp.sin(run(*a)).sum(), (0, 1, 2)))
    split = jax.NamedSharding(make_mesh(**sizes), P(batch, "tensor"))
    placed = [jax.device_put(x, split) for x in (q, k, v)]
    assert collectives(jax.jit(gradient, out_shardings=split), *placed) == {}


def test_heads_that_the_mesh_cannot_share_are_refused():
    q, k, v = (x[None] for x in draw(3, 3))
    with pytest.raises(ValueError, match="heads of q, k and v must be multiples of"):
        sharded_attention(make_mesh(tensor=4), q, k.mT, v)
