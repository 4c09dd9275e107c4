"""The output projection against its equation in float64; gradients and refusals."""

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
from neuronjax.sharding.output_projection import sharded_output_projection
from tests.hlo import collectives
from tests.macro_case import error

FAMILY = registry.resolve_family("OutputProjection")
FORMS = {
    "BNDS": neuronjax.output_projection_cte,
    "DBNS": neuronjax.output_projection_tkg,
}


def operands(form="BNDS", sizes=(2, 3, 4, 5), width=6, dtype="float32", bias=True):
    """Attention, weight and bias; `sizes` are batch, heads, head dim and seq."""
    rng = np.random.default_rng(0)
    named = dict(zip("BNDS", sizes, strict=True))
    shape = tuple(named[axis] for axis in form)
    arrays = [
        rng.standard_normal(shape),
        rng.standard_normal((named["N"] * named["D"], width)),
        # Far from zero: a bias scaled or added twice is seen.
        100 * rng.standard_normal((1, width)),
    ]
    return [jnp.asarray(a, dtype) for a in arrays[: 2 + bias]]


def reference(form, attention, weight, bias=None):
    """`sum_nd attention[b, n, d, s] W[n*D + d] + bias`, in float64."""
    attention, weight = (np.asarray(x, np.float64) for x in (attention, weight))
    attention = attention.transpose([form.index(axis) for axis in "BNDS"])
    batch, heads, width, seq = attention.shape
    out = np.zeros((batch, seq, weight.shape[1]))
    for n, d in np.ndindex(heads, width):
        out += attention[:, n, d, :, None] * weight[n * width + d]
    out = out if bias is None else out + np.asarray(bias, np.float64)[0]
    return out if form == "BNDS" else out.reshape(batch * seq, -1)


def transposed(rows, cores):
    """`[p, l, c, row]` holds column `l*(H/L) + p*(H/(128*L)) + c`."""
    width = rows.shape[1]
    inner = width // (128 * cores)
    out = np.zeros((128, cores, inner, rows.shape[0]))
    for p, core, c in np.ndindex(*out.shape[:3]):
        out[p, core, c] = rows[:, core * (width // cores) + p * inner + c]
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 2, 6, 1), (3, 5, 96, 2)])
def test_it_equals_the_equation(form, bias, sizes):
    arrays = operands(form, sizes, bias=bias)
    out = jax.jit(FORMS[form])(*arrays)
    assert out.dtype == jnp.float32
    assert error(out, reference(form, *arrays)) < 2e-6


@pytest.mark.parametrize(("width", "cores"), [(256, None), (128, None), (512, 1)])
def test_the_transposed_output_lays_columns_on_128_rows(width, cores):
    arrays = operands("DBNS", (2, 2, 4, 3), width)
    out = neuronjax.output_projection_tkg(*arrays, TRANSPOSE_OUT=True, lnc=cores)
    cores = cores or (2 if width % 256 == 0 else 1)
    assert out.shape == (128, cores, width // (128 * cores), 6)
    assert error(out, transposed(reference("DBNS", *arrays), cores)) < 2e-6


def test_output_dtype_is_honoured():
    arrays = operands(dtype="bfloat16")
    out = neuronjax.output_projection_cte(*arrays, output_dtype=jnp.float32)
    assert out.dtype == jnp.float32
    assert error(out, reference("BNDS", *arrays)) < 2e-6
    assert neuronjax.output_projection_cte(*arrays).dtype == jnp.bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_both_modes_and_twice(form):
    arrays = operands(form)
    run = jax.jit(lambda *a: jnp.sin(FORMS[form](*a)))
    arrays[2] /= 100
    check_grads(run, arrays, order=1, modes=["rev", "fwd"], atol=2e-2, rtol=2e-2)
    with jax.enable_x64(True):
        check_grads(run, [a.astype("float64") for a in arrays], order=2)


def test_gradients_of_the_transposed_output():
    attention, weight, bias = operands("DBNS", (2, 2, 4, 3), 256)

    def run(*arrays):
        out = neuronjax.output_projection_tkg(*arrays, TRANSPOSE_OUT=True)
        return jnp.sin(out).sum()

    def plain(*arrays):
        return jnp.sin(neuronjax.output_projection_tkg(*arrays)).sum()

    got = jax.grad(run, (0, 1, 2))(attention, weight, bias)
    wanted = jax.grad(plain, (0, 1, 2))(attention, weight, bias)
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(2, 3, 16, 5), (1, 9, 64, 1)])
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(form, sizes):
    arrays = operands(form, sizes, dtype="bfloat16")
    wanted = reference(form, *arrays)
    got = jax.jit(FORMS[form])(*arrays)
    with neuronjax.plain():
        plain = jax.jit(FORMS[form])(*arrays)
    assert got.dtype == plain.dtype == jnp.bfloat16
    assert error(got, wanted) <= 2 * error(plain, wanted)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_keep_their_dtypes(form):
    """R-24: bfloat16 gradients; float32 master weights get float32 ones."""
    attention, weight, bias = operands(form, dtype="bfloat16")
    for kind in ("bfloat16", "float32"):
        arrays = (attention, weight.astype(kind), bias.astype(kind))
        out, pull = jax.vjp(FORMS[form], *arrays)
        assert out.dtype == jnp.bfloat16
        grads = pull(jnp.ones_like(out))
        assert [g.dtype for g in grads] == [a.dtype for a in arrays]
        wanted = np.ones(out.shape) @ np.asarray(weight, "float64").T
        assert error(grads[0].sum(), wanted.sum()) < 2e-2


@pytest.mark.parametrize("sizes", [(5, 129, 3), (1, 1, 1), (129, 127, 513)])
def test_sizes_that_fill_no_tile(sizes):
    """R-25: one head; its channels are the contraction."""
    rows, inner, columns = sizes
    attention, weight = operands("BNDS", (1, 1, inner, rows), columns, bias=False)
    out, pull = jax.vjp(neuronjax.output_projection_cte, attention, weight)
    assert error(out, reference("BNDS", attention, weight)) < 1e-5
    ones = np.ones((rows, columns))
    d_attention, d_weight = pull(jnp.ones_like(out))
    wide = np.asarray(weight, "float64")
    assert error(d_attention[0, 0], (ones @ wide.T).T) < 1e-5
    assert error(d_weight, np.asarray(attention[0, 0], "float64") @ ones) < 1e-5


def tiles_of(form, attention, weight, bias=None):
    """The weight is laid out as `[N, D, H]`, heads apart."""
    axis = form.index("D")
    heads = weight.reshape(-1, attention.shape[axis], weight.shape[1])
    tiles = [MemrefTile.from_tensor(attention, axis), MemrefTile.from_tensor(heads, 1)]
    return tiles if bias is None else [*tiles, MemrefTile.from_tensor(bias, 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sizes", "width"), [((2, 3, 4, 5), 6), ((1, 2, 256, 1), 384)])
def test_tiles_equal_tensors(form, sizes, width):
    arrays = operands(form, sizes, width)
    arrays[2] /= 100
    head_dim = arrays[0].shape[form.index("D")]
    tiles = tiles_of(form, *arrays)
    if head_dim > 128:
        # The chip has heads of at most 128; the leaf chunks them all the same.
        with pytest.raises(ValueError, match="the chip takes D up to 128"):
            emit.output_projection_kernel(*tiles, form=form)
        return
    got = emit.output_projection_kernel(*tiles, form=form)
    assert error(got.to_tensor(), FORMS[form](*arrays)) < 1e-5

    def loss(lay, *arrays):
        out = emit.output_projection_kernel(*lay(form, *arrays), form=form)
        out = out.to_tensor() if isinstance(out, MemrefTile) else out
        return jnp.sin(out).sum()

    grads = [
        jax.grad(lambda *a, lay=lay: loss(lay, *a), (0, 1, 2))(*arrays)
        for lay in (tiles_of, lambda form, *a: a)
    ]
    for a, b in zip(*grads, strict=True):
        assert error(a, b) < 1e-5


def test_a_transposed_tile_lies_on_its_128_rows():
    arrays = operands("DBNS", (2, 2, 4, 3), 256)
    got = emit.output_projection_kernel(
        *tiles_of("DBNS", *arrays), form="DBNS", transpose_out=True
    )
    assert (got.axis, got.data.shape) == (0, (128, 1, 2, 1, 6))
    wanted = transposed(reference("DBNS", *arrays), 2)
    assert error(got.to_tensor(), wanted) < 2e-6


def test_a_tiled_leaf_keeps_its_operands_tiled():
    """No operand is reshaped or transposed back to its untiled shape."""
    data = [tile.data for tile in tiles_of("BNDS", *operands(width=256))[:2]]
    config = dict(form="BNDS", transpose_out=False, cores=None, out_dtype=None)

    def run(*data):
        return FAMILY.leaf(*data, None, name=FAMILY.names[0], **config, is_tiled=True)

    jaxpr = jax.make_jaxpr(run)(*data).jaxpr
    for eqn in jaxpr.eqns:
        if set(map(id, eqn.invars)) & set(map(id, jaxpr.invars)):
            assert eqn.primitive.name not in ("reshape", "transpose"), eqn
    assert jaxpr.outvars[0].aval.shape == (128, 2, 2, 5)


def test_tiles_that_do_not_fit_are_refused():
    tiles = tiles_of("BNDS", jnp.zeros((1, 1, 128, 1)), jnp.zeros((128, 49280)))
    with pytest.raises(ValueError, match="must fit SBUF of gen3: 196608 bytes"):
        emit.output_projection_kernel(*tiles)


def test_a_size_of_the_error_passes():
    """R-26."""
    attention, weight = operands(width=160, bias=False)
    tiles = tiles_of("BNDS", attention, weight)
    nearest = neuronjax.can("output_projection_kernel", *tiles).nearest
    assert nearest == {"H": 128}
    tiles = tiles_of("BNDS", attention, weight[:, :128])
    assert neuronjax.can("output_projection_kernel", *tiles).on_chip
    assert emit.output_projection_kernel(*tiles).shape == (2, 5, 128)


def test_a_buffer_manager_is_refused_before_anything_else():
    """R-27."""
    attention, weight = operands("DBNS", bias=False)
    words = "^output_projection_tkg: sbm = given has no meaning for arrays: .* SBUF"
    for w in (weight, weight.astype("float8_e4m3")):
        with pytest.raises(NotImplementedError, match=words):
            neuronjax.output_projection_tkg(attention, w, sbm=object())


@pytest.mark.parametrize("form", FORMS)
def test_vmap_with_some_operands_unmapped(form):
    """R-42."""
    attention, weight, bias = operands(form)
    stacked = jnp.stack([attention, attention / 2, -attention])
    run = jax.vmap(FORMS[form], (0, None, None))
    rows = jnp.stack([FORMS[form](a, weight, bias) for a in stacked])
    np.testing.assert_allclose(run(stacked, weight, bias), rows, rtol=1e-5, atol=1e-4)
    for mapped, args in (((1, None), (stacked.swapaxes(0, 1), weight)),):
        got = jax.vmap(FORMS[form], mapped)(*args)
        np.testing.assert_allclose(got + bias, rows, rtol=1e-5, atol=1e-4)
    gradient = jax.grad(lambda w: jnp.sin(run(stacked, w, bias)).sum())(weight)
    wanted = jax.grad(
        lambda w: sum(jnp.sin(FORMS[form](a, w, bias)).sum() for a in stacked)
    )(weight)
    assert error(gradient, wanted) < 1e-5


def test_named_residuals_keep_the_forward_from_running_twice():
    """R-46: the product after the output needs it."""
    arrays = operands()
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names("output_projection_out")
    for policy, times in ((saved, 1), (policies.nothing_saveable, 2)):
        kept = jax.checkpoint(
            lambda *a: jnp.sin(neuronjax.output_projection_cte(*a)), policy=policy
        )
        gradient = jax.grad(lambda *a, f=kept: f(*a).sum())
        assert neuronjax.trace(gradient, *arrays).count("OutputProjection") == times


@pytest.mark.parametrize("form", FORMS)
def test_a_symbolic_batch_exports_with_its_gradient(form):
    """R-49."""
    arrays = operands(form)
    (b,) = export.symbolic_shape("b")
    axis = form.index("B")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
    symbolic = tuple(b if i == axis else n for i, n in enumerate(arrays[0].shape))
    shapes[0] = jax.ShapeDtypeStruct(symbolic, "float32")

    def run(*a):
        return jax.value_and_grad(lambda *a: jnp.sin(FORMS[form](*a)).sum(), (0, 1))(*a)

    saved = export.export(jax.jit(run), platforms=["cpu", "tpu", "cuda"])(*shapes)
    again = export.deserialize(saved.serialize())
    got, wanted = again.call(*arrays), run(*arrays)
    for a, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, w) < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 1), (1, 3), (2, 3), (1, 5)])
def test_heads_and_batch_split_over_a_mesh(form, data, tensor):
    mesh = make_mesh(data=data, tensor=tensor)
    arrays = operands(form, (2, 2 * tensor, 4, 3))

    def split(*a):
        return sharded_output_projection(mesh, *a, form=form, batch="data")

    out, pull = jax.vjp(jax.jit(split), *arrays)
    wanted, plain_pull = jax.vjp(FORMS[form], *arrays)
    assert error(out, wanted) < 1e-5
    for a, b in zip(pull(jnp.cos(out)), plain_pull(jnp.cos(out)), strict=True):
        assert error(a, b) < 1e-4


def test_what_crosses_the_wire():
    """Forward one all-reduce; backward none over the heads' axis."""
    attention, weight, bias = operands("BNDS", (2, 4, 4, 3))
    for axis, sizes in ((None, dict(tensor=2)), ("data", dict(data=2, tensor=2))):
        mesh = make_mesh(**sizes)
        specs = (P(axis, "tensor"), P("tensor"), P(), P(axis))
        ones = jnp.ones((2, 3, 6))
        args = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((attention, weight, bias, ones), specs, strict=True)
        ]

        def run(*a, mesh=mesh, axis=axis):
            return sharded_output_projection(mesh, *a, batch=axis)

        assert collectives(run, *args[:3]) == {"all-reduce": 1}
        pull = lambda *a, f=run: jax.vjp(f, *a[:3])[1](a[3])  # noqa: E731
        wanted = {"all-reduce": 1} if axis else {}
        assert collectives(pull, *args) == wanted


def test_a_replicated_weight_under_shard_map_gets_its_whole_gradient():
    """R-43."""
    mesh = make_mesh(data=4)
    attention, weight = jnp.arange(12.0).reshape(4, 1, 3, 1), jnp.ones((3, 1))
    run = jax.shard_map(
        neuronjax.output_projection_cte,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    gradient = jax.grad(lambda w: run(attention, w).sum())(weight)
    np.testing.assert_allclose(gradient[:, 0], [18, 22, 26])


@pytest.mark.parametrize("explicit", [False, True])
def test_the_same_call_runs_on_auto_and_explicit_meshes(explicit):
    """R-50: without a mesh, under both kinds of axes, and inside shard_map."""
    arrays, run = operands(), jax.jit(neuronjax.output_projection_cte)
    wanted, specs = run(*arrays), (P("data"), P(), P())
    mesh = make_mesh(data=2, explicit=explicit)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip(arrays, specs, strict=True)
        ]
        out = run(*placed)
        inner = jax.shard_map(run, in_specs=specs, out_specs=P("data"))
        mapped = jax.jit(inner)(*placed)
    if explicit:
        assert jax.typeof(out).sharding.spec[0] == "data"
    assert error(jax.device_get(out), wanted) < 1e-6
    assert error(jax.device_get(mapped), wanted) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_every_option_that_changes_the_output_keeps_one_structure(form):
    """R-47."""
    arrays = operands(form, width=256)
    options = (
        {"TRANSPOSE_OUT": True} if form == "DBNS" else {"output_dtype": "bfloat16"}
    )
    for given in ({}, options):

        def run(*a, given=given):
            return FORMS[form](*a, **given)

        out = run(*arrays)
        with neuronjax.plain():
            plain = jax.eval_shape(run, *arrays)
        primal = jax.eval_shape(lambda *a: jax.vjp(run, *a)[0], *arrays)
        mapped = jax.vmap(run)(*(a[None] for a in arrays))[0]
        for other in (plain, primal, mapped, jax.eval_shape(run, *arrays)):
            assert (other.shape, other.dtype) == (out.shape, out.dtype)


def test_an_axis_that_the_mesh_lacks_is_refused():
    message = r"sharded_output_projection: heads must be an axis of the mesh, one of"
    with pytest.raises(ValueError, match=message):
        sharded_output_projection(
            make_mesh(data=2), jnp.zeros((2, 2, 4, 3)), jnp.zeros((8, 6))
        )
