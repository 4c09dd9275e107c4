"""The macro primitive: what every family inherits."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import neuronjax
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.rope import rope
from tests.macro_case import MacroCase

X, TABLE = jnp.ones((8, 2, 2, 6)), jnp.ones((4, 2, 6))


def test_each_identical_macro_is_lowered_once():
    def stack(x):
        for _ in range(30):
            x = neuronjax.RoPE(x, TABLE, TABLE)
        return x

    text = jax.jit(stack).lower(X).as_text()
    assert text.count("func.func private @RoPE") == 1
    assert text.count("call @RoPE") == 30


def test_the_lowering_route_is_part_of_the_cache_key():
    fun = jax.jit(neuronjax.RoPE)
    assert "neuron.RoPE" not in fun.lower(X, TABLE, TABLE).as_text()
    with neuronjax.lowering("composite"):
        assert "neuron.RoPE" in fun.lower(X, TABLE, TABLE).as_text()
    assert "neuron.RoPE" not in fun.lower(X, TABLE, TABLE).as_text()


def test_the_composite_carries_the_config_bag():
    with neuronjax.lowering("composite"):
        text = jax.jit(neuronjax.RoPE).lower(X, TABLE, TABLE).as_text()
    assert "interleaved = false" in text and "lnc_shard = false" in text


def test_plain_mode_is_part_of_the_cache_key():
    fun = jax.jit(neuronjax.RoPE)
    assert neuronjax.trace(fun, X, TABLE, TABLE).names == ("RoPE",)
    with neuronjax.plain():
        assert neuronjax.trace(fun, X, TABLE, TABLE).names == ()


def test_settings_nest():
    with neuronjax.target("gen2"), neuronjax.lowering("composite"):
        from neuronjax.context import settings

        assert (settings().target, settings().route) == ("gen2", "composite")
    assert settings().target == "gen3"


def test_an_eager_call_traces_its_leaf_once(monkeypatch):
    chex.clear_trace_counter()
    case = MacroCase("RoPE")
    monkeypatch.setattr(rope, "leaf", chex.assert_max_traces(rope.leaf, n=1))
    rope._fun.cache_clear()
    for _ in range(3):
        case.macro(*case.flat)
    rope._fun.cache_clear()


def test_an_array_as_a_setting_is_refused_by_name():
    """R-44."""
    message = "RoPE: full must be a hashable Python value .* got"
    with pytest.raises(ValueError, match=message):
        rope(X, TABLE, TABLE, name="RoPE", full=jnp.ones(2), interleaved=False)


def test_an_array_operand_works_in_a_scan_under_grad():
    """R-44: an array that changes from step to step is an operand."""

    def total(x):
        tables = jnp.stack([TABLE, TABLE / 2])

        def body(total, table):
            return total + neuronjax.RoPE(x, table, table).sum(), None

        return lax.scan(body, 0.0, tables)[0]

    steps = [TABLE, TABLE / 2]
    wanted = jax.grad(lambda x: sum(neuronjax.RoPE(x, t, t).sum() for t in steps))(X)
    chex.assert_trees_all_close(jax.jit(jax.grad(total))(X), wanted, rtol=1e-6)


def test_numpy_arrays_are_mapped_like_others():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(jax.vmap(neuronjax.cumsum)(x), np.cumsum(x, -1))


def test_composite_refuses_symbolic_sizes_with_its_reason():
    (batch,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((8, batch, 2, 6), jnp.float32)
    table = jax.ShapeDtypeStruct((4, batch, 6), jnp.float32)
    message = "RoPE: the composite route needs fixed sizes and one platform"
    with (
        neuronjax.lowering("composite"),
        pytest.raises(NotImplementedError, match=message),
    ):
        jax.export.export(jax.jit(neuronjax.RoPE))(x, table, table)


def test_a_name_outside_the_catalog_cannot_be_declared():
    with pytest.raises(KeyError, match="which the catalog lacks"):
        MacroFamily(
            "nonsense",
            ("Nonsense",),
            lambda x, name: (x,),
            plain=lambda x, name: (x,),
            outputs=("out",),
            example=lambda name, dtype, batch: Example((), {}, (), ()),
        )
