"""QKV against its equations in float64, its gradients, and its refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax import MemrefTile, emit
from neuronjax.primitives import registry
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.qkv import (
    head_order,
    shard_qkv_columns,
    sharded_qkv,
    unshard_qkv_columns,
)
from tests.macro_case import error

FAMILY = registry.resolve_family("QKV")
# Each is [q heads, kv heads, head dim]; widths of 6 and 96 are off every tile.
HEADS = [(2, 1, 4), (3, 2, 6)]
# The order of the macro's operands.
ORDER = (
    "input fused_qkv_weights gamma_norm_weights layer_norm_bias bias mlp_prev "
    "attention_prev cos_cache sin_cache"
).split()
NORMS = ["NO_NORM", "RMS_NORM", "LAYER_NORM", "RMS_NORM_SKIP_GAMMA"]


def operands(shape=(2, 3, 6), heads=(2, 1, 4), dtype="float32", scale=1.0, seed=0):
    """Every array operand of `qkv`, by its argument name."""
    rng = np.random.default_rng(seed)
    batch, seq, width = shape
    columns = (heads[0] + 2 * heads[1]) * heads[2]
    shapes = dict(
        input=shape,
        fused_qkv_weights=(width, columns),
        bias=(1, columns),
        gamma_norm_weights=(1, width),
        layer_norm_bias=(1, width),
        mlp_prev=shape,
        attention_prev=shape,
        cos_cache=(batch, seq, heads[2]),
        sin_cache=(batch, seq, heads[2]),
    )
    return {
        k: jnp.asarray(scale * rng.standard_normal(s), dtype) for k, s in shapes.items()
    }


def call(x, heads, norm="RMS_NORM", layout="BSD", add=True, rope=True, eps=1e-6):
    """The arrays that a combination of options uses, and the options."""
    names = ["input", "fused_qkv_weights", "bias"]
    names += ["gamma_norm_weights"] if norm in ("RMS_NORM", "LAYER_NORM") else []
    names += ["layer_norm_bias"] if norm == "LAYER_NORM" else []
    names += ["mlp_prev", "attention_prev"] if add else []
    names += ["cos_cache", "sin_cache"] if rope else []
    options = dict(
        fused_norm_type=norm,
        output_layout=layout,
        fused_residual_add=add,
        fused_rope=rope,
        norm_eps=eps,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        d_head=heads[2],
    )
    return {name: x[name] for name in names}, options


def reference(arrays, options, hidden_actual=None):
    """The equations of the module's docstring, one row at a time, in float64."""
    a = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    nq, nkv, d = (options[k] for k in ("num_q_heads", "num_kv_heads", "d_head"))
    x = a["input"] + a.get("mlp_prev", 0) + a.get("attention_prev", 0)
    norm, eps = options["fused_norm_type"], options["norm_eps"]
    rows = x
    if norm == "LAYER_NORM":
        rows = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    elif norm != "NO_NORM":
        mean = (x**2).sum(-1, keepdims=True) / (hidden_actual or x.shape[-1])
        rows = x / np.sqrt(mean + eps)
    rows = rows * a.get("gamma_norm_weights", 1) + a.get("layer_norm_bias", 0)
    y = rows @ a["fused_qkv_weights"] + a.get("bias", 0)
    heads = y.reshape(*y.shape[:2], nq + 2 * nkv, d)
    if "cos_cache" in a:
        for b, s, n in np.ndindex(*heads.shape[:3]):
            if n < nq + nkv:
                head, half = heads[b, s, n].copy(), d // 2
                turned = np.concatenate([-head[half:], head[:half]])
                cos, sin = a["cos_cache"][b, s], a["sin_cache"][b, s]
                heads[b, s, n] = head * cos + turned * sin
    if options["output_layout"] == "NBSd":
        return heads.transpose(2, 0, 1, 3), x
    return heads.reshape(y.shape), x


def jitted(options):
    return jax.jit(lambda arrays: neuronjax.qkv_cte(**arrays, **options))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
@pytest.mark.parametrize(("add", "rope"), [(False, False), (True, False), (True, True)])
def test_every_combination_equals_the_equations(heads, norm, layout, add, rope):
    x = operands((2, 3, 96), heads)
    arrays, options = call(x, heads, norm, layout, add, rope)
    wanted, _ = reference(arrays, options)
    assert error(jitted(options)(arrays), wanted) < 2e-6


@pytest.mark.parametrize("norm", NORMS)
def test_the_decode_path_returns_the_sum(norm):
    x = operands(heads=(2, 1, 4))
    arrays, options = call(x, (2, 1, 4), norm, rope=False)
    out, total = neuronjax.qkv(**arrays, **options)
    wanted = reference(arrays, options)
    assert error(out, wanted[0]) < 2e-6 and error(total, wanted[1]) < 1e-6


@pytest.mark.parametrize(
    ("shape", "rope", "prefill"),
    [
        ((1, 96, 6), False, False),
        ((1, 97, 6), False, True),
        ((2, 64, 6), False, False),
        ((2, 65, 6), False, True),
        ((1, 1, 6), True, True),
    ],
)
def test_the_dispatch_rule_decides_what_returns_and_nothing_else(shape, rope, prefill):
    arrays, options = call(operands(shape), (2, 1, 4), "RMS_NORM", rope=rope)
    out = neuronjax.qkv(**arrays, **options)
    assert isinstance(out, tuple) is not prefill
    wanted = neuronjax.qkv_cte(**arrays, **options)
    np.testing.assert_array_equal(out if prefill else out[0], wanted)


def test_enum_members_and_their_names_are_one():
    from neuronjax.primitives.options import NormType, QKVOutputLayout

    arrays, options = call(operands(), (2, 1, 4), "RMS_NORM", "NBSd")
    wanted = neuronjax.qkv_cte(**arrays, **options)
    members = dict(
        fused_norm_type=NormType.RMS_NORM, output_layout=QKVOutputLayout.NBSd
    )
    np.testing.assert_array_equal(
        neuronjax.qkv_cte(**arrays, **options | members), wanted
    )


def test_all_columns_of_the_tables_count():
    x, (nq, nkv, d) = operands(), (2, 1, 4)
    arrays, options = call(x, (nq, nkv, d), "NO_NORM", add=False)
    changed = dict(arrays, cos_cache=arrays["cos_cache"].at[..., d // 2 :].add(1.0))
    a, b = (jitted(options)(v).reshape(2, 3, -1, d) for v in (arrays, changed))
    moved = np.abs(a - b).max((0, 1)) > 1e-3
    assert moved[: nq + nkv, d // 2 :].all()
    assert not moved[: nq + nkv, : d // 2].any() and not moved[nq + nkv :].any()


def test_padding_columns_do_not_count():
    x = operands((2, 3, 8), seed=3)
    arrays, options = call(x, (2, 1, 4), "RMS_NORM", add=False, rope=False)
    arrays["input"] = arrays["input"].at[..., 5:].set(0)
    out = neuronjax.qkv_cte(**arrays, **options, hidden_actual=5)
    wanted, _ = reference(arrays, options, hidden_actual=5)
    assert error(out, wanted) < 2e-6
    bare = {k: v if v.shape[-1] != 8 else v[..., :5] for k, v in arrays.items()}
    bare["fused_qkv_weights"] = arrays["fused_qkv_weights"][:5]
    assert error(out, neuronjax.qkv_cte(**bare, **options)) < 2e-6


@pytest.mark.parametrize("tiled", [False, True])
def test_the_sum_of_squares_is_wide(tiled):
    """R-19: 300**2 overflows float16. The chip's tiles are 128 wide at least."""
    n = 128 if tiled else 4
    x = jnp.full((1, 1, n), 300.0, jnp.float16)
    eye, gain = jnp.eye(n, dtype=jnp.float16), jnp.ones((1, n), jnp.float16)
    if tiled:
        tiles = [MemrefTile.from_tensor(a, i) for a, i in ((x, 2), (eye, 0), (gain, 1))]
        out = emit.qkv_kernel(*tiles).to_tensor()
    else:
        out = neuronjax.qkv_tkg(x, eye, gain)
    assert out.dtype == jnp.float16
    np.testing.assert_array_equal(out, jnp.ones((1, 1, n), jnp.float16))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
def test_gradients_in_both_modes_and_twice(norm, layout):
    arrays, options = call(operands(scale=0.7), (2, 1, 4), norm, layout, eps=1e-2)
    fun = jitted(options)
    check_grads(fun, (arrays,), order=1, modes=["rev", "fwd"], atol=2e-2, rtol=2e-2)
    with jax.enable_x64(True):
        wide = {k: v.astype("float64") for k, v in arrays.items()}
        check_grads(fun, (wide,), order=2, atol=1e-4, rtol=1e-4)


def emitted(arrays, options):
    """All outputs of the macro, statistics included."""
    config = dict(
        norm={"RMS_NORM": "rms", "LAYER_NORM": "layer"}[options["fused_norm_type"]],
        eps=options["norm_eps"],
        hidden_actual=None,
        layout="BSD",
        fused_add="prologue",
        fused_rope=True,
        is_tiled=False,
        **{k: options[k] for k in ("d_head", "num_q_heads", "num_kv_heads")},
    )
    return FAMILY(*[arrays.get(k) for k in ORDER], name="QKV", **config)


@pytest.mark.parametrize("norm", ["RMS_NORM", "LAYER_NORM"])
def test_the_cotangent_of_every_output_counts(norm):
    """The stored sum and statistics have gradients, or second order is wrong."""
    arrays, options = call(operands(scale=0.7), (2, 1, 4), norm, eps=1e-2)
    with jax.enable_x64(True):
        wide = {k: v.astype("float64") for k, v in arrays.items()}
        for i in range(3 if norm == "RMS_NORM" else 4):
            check_grads(lambda a, i=i: emitted(a, options)[i], (wide,), 1, ["rev"])


@pytest.mark.parametrize(("norm", "poisoned"), [("RMS_NORM", 2), ("LAYER_NORM", 2)])
def test_a_poisoned_statistic_reaches_what_is_derived_from_it(norm, poisoned):
    arrays, options = call(operands(), (2, 1, 4), norm)
    outs = list(emitted(arrays, options))
    backward = registry.resolve_family("QKVBwd")
    live = tuple(k for k in ORDER if k in arrays)
    config = dict(
        norm={"RMS_NORM": "rms", "LAYER_NORM": "layer"}[norm],
        hidden_actual=None,
        layout="BSD",
        fused_add="prologue",
        fused_rope=True,
        is_tiled=False,
        eps=1e-6,
        live=live,
        d_head=4,
        num_q_heads=2,
        num_kv_heads=1,
    )

    def gradients(outs):
        cotangents = [jnp.ones_like(outs[0]), *[None] * (len(outs) - 1)]
        grads = backward(
            *[arrays.get(k) for k in ORDER], *outs, *cotangents, name="QKVBwd", **config
        )
        return dict(zip(live, grads, strict=True))

    clean = gradients(outs)
    outs[poisoned] = jnp.full_like(outs[poisoned], jnp.nan)
    stained = {k for k, g in gradients(outs).items() if not np.isfinite(g).all()}
    assert all(np.isfinite(g).all() for g in clean.values())
    # What is linear in the cotangent alone does not read it.
    assert stained == set(live) - {"bias", "layer_norm_bias"}
    outs[0] = jnp.full_like(outs[0], jnp.nan)
    outs[poisoned] = emitted(arrays, options)[poisoned]
    assert all(np.isfinite(g).all() for g in gradients(outs).values())


@pytest.mark.parametrize("shape", [(2, 5, 96), (1, 1, 96)])
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(shape):
    x = operands(shape, (3, 2, 6), "bfloat16")
    arrays, options = call(x, (3, 2, 6), "LAYER_NORM")
    wanted, _ = reference(arrays, options)
    got = jitted(options)(arrays)
    with neuronjax.plain():
        plain = jitted(options)(arrays)
    assert got.dtype == plain.dtype == jnp.bfloat16
    assert error(got, wanted) <= 2 * error(plain, wanted)


def test_gradients_keep_their_dtypes():
    """R-24: bfloat16 gradients; float32 master weights get float32 ones."""
    x = operands(heads=(2, 1, 4), dtype="bfloat16")
    arrays, options = call(x, (2, 1, 4), "RMS_NORM")
    for wide in (False, True):
        weights = dict(arrays)
        if wide:
            for name in ("fused_qkv_weights", "gamma_norm_weights", "bias"):
                weights[name] = weights[name].astype("float32")
        out = jitted(options)(weights)
        grads = jax.grad(lambda a: jitted(options)(a).astype("float32").sum())(weights)
        assert out.dtype == jnp.bfloat16
        assert {k: g.dtype for k, g in grads.items()} == {
            k: v.dtype for k, v in weights.items()
        }
        wanted, _ = reference(weights, options)
        assert error(out, wanted) < 2e-2


@pytest.mark.parametrize("sizes", [(5, 129, 3), (1, 1, 1), (129, 127, 513)])
def test_sizes_that_fill_no_tile(sizes):
    """R-25: the projection alone, and its gradients."""
    rows, width, columns = sizes
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, rows, width)).astype("float32")
    w = rng.standard_normal((width, columns)).astype("float32")
    out, pull = jax.vjp(lambda x, w: neuronjax.qkv(x, w), x, w)
    assert error(out, x.astype("float64") @ w.astype("float64")) < 1e-5
    dx, dw = pull(jnp.ones_like(out))
    assert error(dx, np.ones((1, rows, columns)) @ w.T.astype("float64")) < 1e-5
    assert error(dw, x[0].T.astype("float64") @ np.ones((rows, columns))) < 1e-5


def tiles_of(arrays):
    axes = dict(input=2, fused_qkv_weights=0, cos_cache=2, sin_cache=2, mlp_prev=2)
    axes |= dict(attention_prev=2)
    return {k: MemrefTile.from_tensor(v, axes.get(k, 1)) for k, v in arrays.items()}


RENAMED = dict(
    input="hidden",
    fused_qkv_weights="qkv_w",
    bias="qkv_bias",
    gamma_norm_weights="norm_w",
    layer_norm_bias="norm_bias",
    mlp_prev="mlp_out",
    attention_prev="attn_out",
    fused_norm_type="norm_type",
    norm_eps="eps",
)


def emitter_arguments(arrays, options):
    dropped = ("fused_residual_add", "fused_rope")
    options = {k: v for k, v in options.items() if k not in dropped}
    return {RENAMED.get(k, k): v for k, v in (arrays | options).items()}


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


UNBUILT = {
    "qkv": dict(
        quantization_type="ROW",
        qkv_w_scale=jnp.ones((1, 16)),
        qkv_in_scale=jnp.ones((1, 1)),
        k_cache=jnp.zeros((2, 8, 4)),
        v_cache=jnp.zeros((2, 8, 4)),
        k_scale=jnp.ones((128, 1)),
        v_scale=jnp.ones((128, 1)),
        fp8_max=240.0,
        fp8_min=-240.0,
        kv_dtype="float8_e4m3",
        use_block_kv=True,
        block_size=16,
        slot_mapping=jnp.zeros((2, 3), jnp.int32),
        sbm=object(),
        is_h_dim_4h_transposed=True,
        weight_layout="MX_CONTIGUOUS",
    )
}
UNBUILT["qkv_cte"] = {
    k: v for k, v in UNBUILT["qkv"].items() if k != "is_h_dim_4h_transposed"
} | dict(is_input_swizzled=True)
UNBUILT["qkv_tkg"] = {
    k: UNBUILT["qkv"][k]
    for k in ("quantization_type", "qkv_w_scale", "qkv_in_scale", "sbm")
} | dict(is_h_dim_4h_transposed=True)


@pytest.mark.parametrize(
    ("function", "option"), [(f, option) for f in UNBUILT for option in UNBUILT[f]]
)
def test_an_option_that_is_not_built_refuses(function, option):
    """R-27: it never answers wrongly, whatever else is wrong with the call."""
    value = UNBUILT[function][option]
    for weight in (jnp.zeros((6, 16)), jnp.zeros((6, 16), "float8_e4m3")):
        with pytest.raises(NotImplementedError, match=f"^{function}: {option} = .*are"):
            getattr(neuronjax, function)(
                jnp.zeros((2, 3, 6)), weight, **{option: value}
            )


def test_can_reports_an_option_that_is_not_built():
    report = neuronjax.can(
        "qkv", jnp.zeros((2, 3, 128)), jnp.zeros((128, 16)), quantization_type="ROW"
    )
    assert not report
    assert "quantization_type = ROW is not built yet" in str(report)


def test_hints_change_no_value():
    arrays, options = call(operands(), (2, 1, 4))
    wanted = neuronjax.qkv(**arrays, **options)
    hints = dict(use_auto_allocation=True, load_input_with_DMA_transpose=False)
    np.testing.assert_array_equal(neuronjax.qkv(**arrays, **options, **hints), wanted)


@pytest.mark.parametrize("x64", [False, True])
def test_scalars_do_not_change_the_dtype(x64):
    """R-48."""
    x = operands(heads=(2, 1, 4), dtype="bfloat16")
    arrays, options = call(x, (2, 1, 4), "RMS_NORM")
    with jax.enable_x64(x64):
        forms = [1e-6, np.float64(1e-6), np.float32(1e-6), jnp.float32(1e-6), 0]
        for eps in (*forms, jnp.asarray(1e-6)):
            given = dict(options, norm_eps=eps)
            out, pull = jax.vjp(lambda a, o=given: neuronjax.qkv_cte(**a, **o), arrays)
            (grads,) = pull(jnp.ones_like(out))
            assert out.dtype == jnp.bfloat16
            assert {g.dtype for g in grads.values()} == {jnp.dtype("bfloat16")}


def test_an_array_where_a_number_is_needed_is_named():
    """R-44."""
    arrays, options = call(operands(), (2, 1, 4))

    def run(eps):
        return neuronjax.qkv_cte(**arrays, **options | dict(norm_eps=eps))

    with pytest.raises(ValueError, match="qkv_cte: norm_eps, .* got norm_eps of type"):
        jax.jit(run)(1e-6)


def test_vmap_with_some_operands_unmapped():
    """R-42: an unmapped weight gets one summed gradient, and no copy."""
    arrays, options = call(operands(), (2, 1, 4))
    stacked = dict(arrays, input=jnp.stack([arrays["input"], arrays["input"] / 2]))
    dims = ({k: 0 if k == "input" else None for k in arrays},)
    run = jax.vmap(lambda a: neuronjax.qkv_cte(**a, **options), dims)
    rows = [jitted(options)(dict(arrays, input=x)) for x in stacked["input"]]
    np.testing.assert_allclose(run(stacked), jnp.stack(rows), rtol=1e-5, atol=1e-5)
    grads = jax.grad(lambda a: jnp.sin(run(a)).sum())(stacked)
    wanted = jax.grad(
        lambda a: sum(
            jnp.sin(jitted(options)(dict(a, input=x))).sum() for x in a["input"]
        )
    )(stacked)
    for name, gradient in wanted.items():
        assert error(grads[name], gradient) < 1e-5
    jacobian = jax.jacrev(lambda w: neuronjax.qkv(jnp.ones((1, 1, 2)), w))(jnp.eye(2))
    assert jacobian.shape == (1, 1, 2, 2, 2)


def test_named_residuals_keep_the_forward_from_running_twice():
    """R-46."""
    arrays, options = call(operands(), (2, 1, 4), "LAYER_NORM")
    names = "out fused_hidden mean rstd".split()
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names(*(f"qkv_{name}" for name in names))
    for policy, times in ((saved, 1), (policies.nothing_saveable, 2)):
        kept = jax.checkpoint(jitted(options), policy=policy)
        gradient = jax.grad(lambda a, f=kept: jnp.sin(f(a)).sum())
        assert neuronjax.trace(gradient, arrays).count("QKV") == times


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("add", [False, True])
def test_every_option_that_changes_outputs_keeps_one_structure(norm, add):
    """R-47."""
    arrays, options = call(operands(), (2, 1, 4), norm, add=add, rope=False)

    def run(a):
        return neuronjax.qkv(**a, **options)

    wanted = jax.tree.map(jax.typeof, run(arrays))
    shapes = jax.eval_shape(run, arrays)
    with neuronjax.plain():
        plain = jax.eval_shape(run, arrays)
    primal = jax.eval_shape(lambda a: jax.vjp(run, a)[0], arrays)
    mapped = jax.vmap(run)(jax.tree.map(lambda x: x[None], arrays))
    mapped = jax.tree.map(lambda x: jax.typeof(x[0]), mapped)
    for other in (shapes, plain, primal, mapped):
        assert jax.tree.structure(other) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(wanted), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_a_symbolic_batch_exports_with_its_gradient():
    """R-49."""
    arrays, options = call(operands(), (2, 1, 4))
    (b,) = export.symbolic_shape("b")
    whole = ("fused_qkv_weights", "bias", "gamma_norm_weights")
    shapes = {
        k: jax.ShapeDtypeStruct(v.shape if k in whole else (b, *v.shape[1:]), v.dtype)
        for k, v in arrays.items()
    }

    def run(a):
        loss = lambda a: jnp.sin(neuronjax.qkv(**a, **options)).sum()  # noqa: E731
        return jax.value_and_grad(loss)(a)

    saved = export.export(jax.jit(run), platforms=["cpu", "tpu", "cuda"])(shapes)
    again = export.deserialize(saved.serialize())
    got, wanted = again.call(arrays), run(arrays)
    for a, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, w) < 1e-5


def test_one_row_against_narrow_weights_keeps_the_activations_precision():
    """The two-row form carries what rounding the row to bfloat16 takes away."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 1, 576)), "float32")
    w = jnp.asarray(rng.standard_normal((576, 96)), "bfloat16")
    got = neuronjax.qkv(x, w)
    wanted = np.asarray(x, "float64") @ np.asarray(w, "float64")
    assert got.dtype == jnp.float32 and error(got, wanted) < 1e-4


def collectives(fun, *args):
    """How often each collective stands in the compiled program."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: n for kind, n in found.items() if n}


@pytest.mark.parametrize("layout", ["BSD", "NBSd"])
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (1, 3), (2, 3), (1, 5)])
def test_heads_and_batch_split_over_a_mesh(layout, data, tensor):
    heads = (2 * tensor, tensor, 4)
    mesh = make_mesh(data=data, tensor=tensor)
    arrays, options = call(operands((2, 3, 6), heads), heads, "RMS_NORM", layout)
    counts = dict(num_q_heads=heads[0], num_kv_heads=heads[1])
    placed = dict(arrays)
    for name in ("fused_qkv_weights", "bias"):
        placed[name] = shard_qkv_columns(arrays[name], *counts.values(), tensor)
        back = unshard_qkv_columns(placed[name], *counts.values(), tensor)
        np.testing.assert_array_equal(back, arrays[name])

    def split(a):
        out = sharded_qkv(mesh, **a, **options, batch="data", heads="tensor")
        if layout == "NBSd":
            return out[np.argsort(head_order(*counts.values(), tensor))]
        return unshard_qkv_columns(out, *counts.values(), tensor)

    out, pull = jax.vjp(jax.jit(split), placed)
    wanted, plain_pull = jax.vjp(jitted(options), arrays)
    assert error(out, wanted) < 1e-5
    (grads,), (plain,) = pull(jnp.cos(wanted)), plain_pull(jnp.cos(wanted))
    for name in ("fused_qkv_weights", "bias"):
        plain[name] = shard_qkv_columns(plain[name], *counts.values(), tensor)
    for name, gradient in plain.items():
        assert error(grads[name], gradient) < 1e-5, name


def test_what_crosses_the_wire():
    """Forward nothing; backward one all-reduce for each set of axes."""
    arrays, options = call(operands((2, 3, 6), (4, 2, 4)), (4, 2, 4), "RMS_NORM")
    for sizes, axes, times in (
        (dict(tensor=2), dict(heads="tensor"), 1),
        (dict(data=2, tensor=2), dict(heads="tensor", batch="data"), 3),
    ):
        mesh = make_mesh(**sizes)
        rows, columns = P(axes.get("batch")), P(None, "tensor")
        whole = dict(fused_qkv_weights=columns, bias=columns, gamma_norm_weights=P())
        placed = {
            k: jax.device_put(v, NamedSharding(mesh, whole.get(k, rows)))
            for k, v in arrays.items()
        }

        def run(a, mesh=mesh, axes=axes):
            return sharded_qkv(mesh, **a, **options, **axes)

        cotangent = jax.eval_shape(run, placed)
        cotangent = jax.device_put(
            jnp.ones(cotangent.shape), NamedSharding(mesh, P(*rows, None, "tensor"))
        )
        assert collectives(run, placed) == {}
        pull = lambda a, ct, f=run: jax.vjp(f, a)[1](ct)  # noqa: E731
        assert collectives(pull, placed, cotangent) == {"all-reduce": times}


def test_a_replicated_weight_under_shard_map_gets_its_whole_gradient():
    """R-43."""
    mesh = make_mesh(data=4)
    x, w = jnp.arange(12.0).reshape(4, 1, 3), jnp.ones((3, 1))
    run = jax.shard_map(
        neuronjax.qkv, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    gradient = jax.grad(lambda w: run(x, w).sum())(w)
    np.testing.assert_allclose(gradient[:, 0], [18, 22, 26])


@pytest.mark.parametrize("explicit", [False, True])
def test_the_same_call_runs_on_auto_and_explicit_meshes(explicit):
    """R-50: without a mesh, under both kinds of axes, and inside shard_map."""
    arrays, options = call(operands((2, 3, 6)), (2, 1, 4))
    wanted = jitted(options)(arrays)
    mesh = make_mesh(data=2, explicit=explicit)
    whole = ("fused_qkv_weights", "bias", "gamma_norm_weights")
    specs = {k: P() if k in whole else P("data") for k in arrays}
    with jax.set_mesh(mesh):
        placed = {
            k: jax.device_put(v, NamedSharding(mesh, specs[k]))
            for k, v in arrays.items()
        }
        out = jitted(options)(placed)
        inner = jax.shard_map(jitted(options), in_specs=(specs,), out_specs=P("data"))
        mapped = jax.jit(inner)(placed)
    if explicit:
        assert jax.typeof(out).sharding.spec[0] == "data"
    assert error(jax.device_get(out), wanted) < 1e-6
    assert error(jax.device_get(mapped), wanted) < 1e-6


def test_heads_that_do_not_divide_are_refused():
    mesh = make_mesh(tensor=2)
    x = operands(heads=(2, 1, 4))
    with pytest.raises(
        ValueError, match="num_q_heads = 2 and num_kv_heads = 1 must be"
    ):
        sharded_qkv(
            mesh, x["input"], x["fused_qkv_weights"], num_q_heads=2, num_kv_heads=1
        )
    with pytest.raises(ValueError, match="batch must be an axis of the mesh"):
        sharded_qkv(
            mesh,
            x["input"],
            x["fused_qkv_weights"],
            num_q_heads=2,
            num_kv_heads=2,
            batch="rows",
        )
    with pytest.raises(ValueError, match="columns must be a multiple of 4 heads"):
        shard_qkv_columns(jnp.zeros((3, 7)), 2, 1, 1)
