"""The emitters of QKV: tiles, NAMEs, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import MemrefTile, emit
from tests.macro_case import error
from tests.qkv_case import (
    FAMILY,
    NORMS,
    call,
    emitter_arguments,
    operands,
    tiles_of,
)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
@pytest.mark.parametrize("heads", [(2, 1, 4), (1, 1, 128), (2, 1, 256)])
def test_tiles_equal_tensors(norm, layout, heads):
    # The chip's prefill path, which alone rotates, has NBSd for heads of 128 only.
    rope = layout == "BSD" or heads[2] == 128
    x = operands((2, 3, 256), heads)
    arrays, options = call(x, heads, norm, layout, rope=rope)
    arrays["fused_qkv_weights"] /= 16
    out, total = emit.qkv_fused_add_kernel(
        **emitter_arguments(arrays, options), return_sum=True
    )
    tiles = emitter_arguments(tiles_of(arrays), options)
    got, got_total = emit.qkv_fused_add_kernel(**tiles, return_sum=True)
    assert got.axis == {"BSD": 2, "NBSd": 3}[layout] and got_total.axis == 2
    assert error(got.to_tensor(), out) < 1e-5
    assert error(got_total.to_tensor(), total) < 1e-6
    assert got.data.shape[0] <= 128


def test_gradients_of_tiles_equal_those_of_tensors():
    heads = (2, 1, 64)
    arrays, options = call(operands((2, 3, 256), heads), heads, "LAYER_NORM")
    arrays["fused_qkv_weights"] /= 16

    def loss(arrays, lay):
        args = emitter_arguments(lay(arrays), options)
        out = emit.qkv_fused_add_kernel(**args)
        out = out.to_tensor() if isinstance(out, MemrefTile) else out
        return jnp.sin(out).sum()

    wanted = jax.grad(loss)(arrays, lambda a: a)
    got = jax.grad(loss)(arrays, tiles_of)
    for name, gradient in wanted.items():
        assert error(got[name], gradient) < 1e-4, name


def test_a_tiled_leaf_keeps_its_operands_tiled():
    """No operand is reshaped or transposed back to its untiled shape."""
    example = FAMILY.example("TiledNativeKernelQKV", jnp.float32, 2)
    flat, tree = jax.tree.flatten(example.operands)
    leaf = FAMILY.leaf

    def run(*flat):
        operands = jax.tree.unflatten(tree, flat)
        return leaf(*operands, name="TiledNativeKernelQKV", **example.config)

    jaxpr = jax.make_jaxpr(run)(*flat).jaxpr
    large = {id(v) for v in jaxpr.invars if np.prod(v.aval.shape[:2]) > 128}
    assert len(large) == 4
    for eqn in jaxpr.eqns:
        if any(id(v) in large for v in eqn.invars):
            assert eqn.primitive.name not in ("reshape", "transpose"), eqn


def test_a_tile_that_does_not_fit_is_refused():
    x, w = jnp.zeros((1, 1, 128)), jnp.zeros((128, 49280))
    tiles = [MemrefTile.from_tensor(x, 2), MemrefTile.from_tensor(w, 0)]
    with pytest.raises(ValueError, match="must fit SBUF of gen3: 196608 bytes"):
        emit.qkv_kernel(*tiles, norm_type="NO_NORM")


def test_the_name_follows_the_operands():
    arrays, options = call(operands((2, 3, 128)), (2, 1, 4), add=False)
    args = emitter_arguments(arrays, options)
    for given, name in ((args, "QKV"), (None, "TiledNativeKernelQKV")):
        given = given or emitter_arguments(tiles_of(arrays), options)
        static = {k: v for k, v in given.items() if not hasattr(v, "dtype")}
        live = {k: v for k, v in given.items() if k not in static}
        jaxpr = jax.make_jaxpr(lambda kw, s=static: emit.qkv_kernel(**kw, **s))(live)
        names = [e.params["name"] for e in jaxpr.eqns if e.primitive is FAMILY.macro_p]
        assert names == [name]


def test_the_fused_add_is_one_equation():
    arrays, options = call(operands(), (2, 1, 4), "RMS_NORM")
    jaxpr = jax.make_jaxpr(lambda a: neuronjax.qkv_cte(**a, **options))(arrays).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns] == ["qkv"]
    assert dict(jaxpr.eqns[0].params["config"])["fused_add"] == "prologue"


def test_the_emitter_without_residuals_is_the_plain_one():
    arrays, options = call(operands(), (2, 1, 4), add=False)
    args = emitter_arguments(arrays, options)
    np.testing.assert_array_equal(
        emit.qkv_fused_add_kernel(**args), emit.qkv_kernel(**args)
    )


def test_all_violations_come_in_one_error_with_a_size_that_passes():
    """R-26."""
    x, w = jnp.zeros((1, 2, 6)), jnp.zeros((6, 160))
    tiles = dict(hidden=MemrefTile.from_tensor(x, 2), qkv_w=MemrefTile.from_tensor(w))
    with pytest.raises(ValueError) as refusal:
        emit.qkv_kernel(**tiles, norm_type="NO_NORM", hidden_actual=9)
    assert "hidden_actual must lie between 1 and H = 6, got 9" in str(refusal.value)
    with pytest.raises(ValueError) as refusal:
        emit.qkv_kernel(**tiles, norm_type="NO_NORM")
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3 and lines[2].endswith("rule: H = 128, I = 128")
    report = neuronjax.can("qkv_kernel", **tiles, norm_type="NO_NORM")
    assert {"H", "I"} <= report.nearest.keys()
    sizes = report.nearest
    x, w = jnp.zeros((1, 2, sizes["H"])), jnp.zeros((sizes["H"], sizes["I"]))
    tiles = dict(hidden=MemrefTile.from_tensor(x, 2), qkv_w=MemrefTile.from_tensor(w))
    assert neuronjax.can("qkv_kernel", **tiles, norm_type="NO_NORM").on_chip
    assert emit.qkv_kernel(**tiles, norm_type="NO_NORM").shape == (1, 2, sizes["I"])


REFUSED = {
    "qkv": dict(
        quantization_type="STATIC_MX",
        sbm=object(),
        is_h_dim_4h_transposed=True,
    ),
    "qkv_cte": dict(
        quantization_type="STATIC_MX",
        sbm=object(),
        is_input_swizzled=True,
    ),
    "qkv_tkg": dict(sbm=object(), is_h_dim_4h_transposed=True),
    "qkv_kernel": dict(quantization_type="STATIC_MX"),
    "qkv_fused_add_kernel": dict(quantization_type="STATIC_MX"),
}


@pytest.mark.parametrize(
    ("function", "option"), [(f, option) for f in REFUSED for option in REFUSED[f]]
)
def test_an_option_that_is_not_taken_refuses(function, option):
    """R-27: it never answers wrongly, whatever else is wrong with the call."""
    value = REFUSED[function][option]
    words = "= given has no meaning" if option == "sbm" else "= .* is not built yet; "
    for weight in (jnp.zeros((6, 16)), jnp.zeros((6, 16), "float8_e4m3")):
        with pytest.raises(NotImplementedError, match=f"^{function}: {option} {words}"):
            run = getattr(neuronjax, function, getattr(emit, function, None))
            run(jnp.zeros((2, 3, 6)), weight, **{option: value})


def test_can_reports_an_option_that_is_not_built():
    report = neuronjax.can(
        "qkv",
        jnp.zeros((2, 3, 128)),
        jnp.zeros((128, 16)),
        quantization_type="STATIC_MX",
    )
    assert not report
    assert "quantization_type = STATIC_MX is not built yet" in str(report)


def test_hints_change_no_value():
    arrays, options = call(operands(), (2, 1, 4))
    wanted = neuronjax.qkv(**arrays, **options)
    hints = dict(use_auto_allocation=True, load_input_with_DMA_transpose=False)
    np.testing.assert_array_equal(neuronjax.qkv(**arrays, **options, **hints), wanted)


def test_an_array_where_a_number_is_needed_is_named():
    """R-44."""
    arrays, options = call(operands(), (2, 1, 4))

    def run(eps):
        return neuronjax.qkv_cte(**arrays, **options | dict(norm_eps=eps))

    with pytest.raises(ValueError, match="qkv_cte: norm_eps, .* got norm_eps of type"):
        jax.jit(run)(1e-6)
