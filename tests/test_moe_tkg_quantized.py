"""A decode step's experts with quantized weights, and on tiles."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.kernels.expert_mlps.leaf import expert_mlps_fwd
from neuronjax.kernels.expert_mlps.operands import TILE_AXES, Operands
from neuronjax.primitives.expert_mlps.facts import ARGUMENTS
from neuronjax.tools.trace import inner_jaxprs
from tests.moe_decode_case import (
    FLOATS,
    FORMS,
    Case,
    Decode,
    block_scaled,
    call,
    close,
    gradients,
    run,
    without,
)


def fp8(given, seed=0):
    """The call with fp8 weights and a scale a column."""
    rng = np.random.default_rng(seed)
    local, d_ff, width = given["expert_down_weights"].shape

    def scale(*shape):
        return jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)

    weights = ("expert_gate_up_weights", "expert_down_weights")
    codes = {key: given[key].astype(jnp.float8_e4m3) for key in weights}
    return given | dict(
        codes,
        expert_gate_up_weights_scale=scale(local, 2, d_ff),
        expert_down_weights_scale=scale(local, width),
    )


@pytest.mark.parametrize("form", FORMS)
def test_fp8_weights_scale_their_columns(form):
    given = fp8(call(**FORMS[form]))
    wanted, seed = Decode(given), np.random.default_rng(1).normal(size=(5, 8))
    close(run(given), wanted.out())
    names = [key for key in FLOATS if not key.endswith("weights")]
    found = gradients(given, jnp.asarray(seed, jnp.float32), names)
    exact = wanted.grads(seed)
    for key in names:
        close(found[key], exact[key], 1e-4)
    scales = ("expert_gate_up_weights_scale", "expert_down_weights_scale")
    for grad in gradients(given, jnp.ones((5, 8)), scales).values():
        assert not grad.any()


@pytest.mark.parametrize(
    ("form", "kind", "d_ff"),
    [
        ("selective", "float4_e2m1fn", 90),
        ("selective", "float8_e4m3fn", 24),
        ("all, masked", "float4_e2m1fn", 24),
        ("all, masked", "float8_e5m2", 90),
        ("all", "float8_e4m3fn", 520),
    ],
)
def test_block_scaled_weights(form, kind, d_ff):
    given = call(tokens=3, width=512, d_ff=d_ff, local=2, **_small(form))
    given = without(given, "expert_gate_up_bias")
    quantized, dense = block_scaled(given, kind)
    exact = Decode(dense, mx=True)
    close(run(quantized), exact.out(), 1e-5)
    names = ("hidden_input", "expert_affinities", "expert_down_bias")
    seed = np.random.default_rng(1).normal(size=(3, 512))
    found = gradients(quantized, jnp.asarray(seed, jnp.float32), names)
    wanted = exact.grads(seed)
    for key in names:
        close(found[key], wanted[key], 1e-4)


def _small(form):
    options = dict(FORMS[form], experts=2)
    return dict(options, experts=4) if "rank_id" in options else options


def test_a_quantized_hidden_state_is_not_rounded_again():
    """Codes as they may come: a block whose largest value is 1.875 times a power."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 0x5F, (128, 4 * 4)).astype(np.uint8)
    codes[codes % 8 == 7] = 0x5F  # 1.875 * 2**4
    scale = rng.integers(118, 122, (16, 4)).astype(np.uint8)
    held = jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    packed = neuronjax.pack_mx(held, "float8_e4m3fn")
    values = neuronjax.dequantize_mx(packed, jnp.asarray(scale), "float8_e4m3fn")
    # [128, T, 4] to columns in order (q, p).
    rows = np.asarray(values).reshape(128, 4, 4).transpose(1, 2, 0).reshape(4, 512)
    given = call(tokens=4, width=512, d_ff=16, local=2, **_small("all, masked"))
    given = without(given, "expert_gate_up_bias")
    quantized, dense = block_scaled(given, "float4_e2m1fn")
    quantized |= dict(
        hidden_input=packed.reshape(128, 1, 4),
        hidden_input_scale=jnp.asarray(scale).reshape(16, 1, 4),
        output_dtype="float32",
    )
    exact = Decode(dense | dict(hidden_input=rows), mx=True, quantized_hidden=True)
    close(run(quantized), exact.out(), 1e-5)
    twice = Decode(dense | dict(hidden_input=rows), mx=True)
    assert np.abs(exact.out() - twice.out()).max() > 1e-3 * np.abs(exact.out()).max()
    names = ("expert_affinities", "expert_down_bias")
    seed = rng.normal(size=(4, 512))
    found = gradients(quantized, jnp.asarray(seed, jnp.float32), names)
    for key in names:
        close(found[key], exact.grads(seed)[key], 1e-4)


@pytest.mark.parametrize("width", [384, 378])
def test_block_scaled_weights_refuse_other_widths(width):
    given = call(tokens=3, width=512, d_ff=32, local=1, experts=1, k=1)
    given = without(given, "expert_gate_up_bias")
    quantized, _ = block_scaled(given, "float4_e2m1fn")
    x = quantized["hidden_input"][:, :width]
    with pytest.raises(ValueError, match=f"in multiples of 512, got {width}"):
        run(quantized, hidden_input=x)


def _own_names(given: Case) -> Case:
    names = {theirs: ours for ours, theirs in ARGUMENTS["moe_tkg"].items()}
    return {names.get(key, key): x for key, x in given.items()}


def _tiles(given) -> Case:
    return {
        key: MemrefTile.from_tensor(x, TILE_AXES[key])
        if key in TILE_AXES and hasattr(x, "shape")
        else x
        for key, x in _own_names(given).items()
    }


# As the chip takes them: tiles refuse what it refuses.
TILED = {form: dict(FORMS[form], tokens=6) for form in ("selective", "all, masked")}
TILED["all, dynamic"] = FORMS["all, dynamic"] | dict(tokens=16, local=1, block_size=8)


@pytest.mark.parametrize(
    ("form", "quantized"),
    [("selective", False), ("all, masked", True), ("all, dynamic", False)],
)
def test_tiles_equal_tensors(form, quantized):
    given = call(width=256, d_ff=6, **TILED[form])
    table = given["expert_affinities"]  # every other token leaves its blocks, or none
    given["expert_affinities"] = table.at[::2].set(0)
    given = fp8(given) if quantized else given
    live = {key: given[key] for key in FLOATS if given[key].dtype != jnp.float8_e4m3}

    def on_tiles(live):
        return emit.expert_mlps_kernel(**_tiles(given | live)).to_tensor()

    @functools.partial(jax.jit, static_argnums=0)
    def both(fun, live):
        gradient = jax.grad(lambda live: jnp.sin(fun(live)).sum())
        return fun(live), gradient(live)

    out, found = both(on_tiles, live)
    exact, wanted = both(lambda live: run(given, **live), live)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
    for key in live:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-4, atol=1e-5)
    names = neuronjax.trace(on_tiles, live).names
    assert names == ("ExpertMLPs",)


def every_equation(jaxpr):
    """The equations of a jaxpr, and of those that they hold."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from every_equation(inner)


@pytest.mark.parametrize("form", TILED)
def test_a_tiled_leaf_keeps_its_operands_tiled(form):
    """No hidden state, weight, bias or scale is laid out again."""
    tiles = _tiles(fp8(call(width=256, d_ff=7, **TILED[form])))
    (row,) = neuronjax.trace(lambda: emit.expert_mlps_kernel(**tiles)).rows
    data = [getattr(tiles.get(key), "data", None) for key in Operands._fields]

    def leaf(*data):
        return expert_mlps_fwd(*data, name="ExpertMLPs", **dict(row.config))

    laid = {
        x.shape
        for key, x in zip(Operands._fields, data, strict=True)
        if x is not None and key not in ("affinities", "index", "rank")
    }
    closed = jax.make_jaxpr(leaf)(*data)
    read = [
        (eqn, var.aval.shape) for eqn in every_equation(closed) for var in eqn.invars
    ]
    assert {shape for _, shape in read} >= laid
    for eqn, shape in read:
        assert shape not in laid or eqn.primitive.name not in ("reshape", "transpose")
    assert closed.out_avals[0].shape == tiles["hidden"].data.shape


def test_keywords_of_the_config_bag_are_no_hints():
    given = _own_names(call())
    for name, value in dict(is_tiled=True, quantization="ROW", activaton=0).items():
        with pytest.raises(ValueError, match=f"'{name}' is neither an option nor"):
            emit.expert_mlps_kernel(**given, **{name: value})
    hinted = neuronjax.trace(lambda: emit.expert_mlps_kernel(**given, num_stages=2))
    assert ("num_stages", 2) in hinted.rows[0].config
