"""`neuronjax.export`: names, values, derivatives, nesting, files, refusals."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import nn
from neuronjax.tools.export.exporting import PLATFORMS
from tests.export_case import close, norm, normal


def test_one_platform_and_fixed_sizes_give_composites():
    program = norm(2, 8, platforms="cpu")
    assert program.route == "composite"
    assert program.names == ("NeuronReduceMacro",)
    assert 'stablehlo.composite "neuron.NeuronReduceMacro"' in program.modules[0].text


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(platforms=("cpu", "tpu")),
        dict(platforms="cpu", symbolic=("b, ...", None)),
        dict(platforms="cpu", composites=False),
    ],
    ids=lambda options: ", ".join(options) or "defaults",
)
def test_the_rest_gives_functions_of_that_name(options):
    program = norm(2, 8, **options)
    assert program.route == "inline"
    assert program.names == ("NeuronReduceMacro",)
    assert "stablehlo.composite" not in program.modules[0].text
    wanted = options.get("platforms", PLATFORMS)
    assert program.platforms == ((wanted,) if isinstance(wanted, str) else wanted)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(platforms=("cpu", "tpu")), r"platforms \('cpu', 'tpu'\)"),
        (dict(platforms="cpu", symbolic=("b, ...", None)), "open sizes"),
    ],
)
def test_composites_are_refused_where_stablehlo_cannot_hold_them(options, why):
    with pytest.raises(ValueError, match=f"composites=True must .* got {why}"):
        norm(2, 8, composites=True, **options)


def test_a_route_chosen_outside_does_not_leak_in():
    with neuronjax.lowering("composite"):
        assert norm(2, 8).route == "inline"
    assert norm(2, 8, platforms="cpu").route == "composite"


def test_the_derivative_is_lowered_by_the_same_route():
    for platforms, route in (("cpu", "composite"), (("cpu", "tpu"), "inline")):
        program = norm(2, 8, platforms=platforms, vjp=True)
        assert program.vjp_order == 1
        assert [module.route for module in program.modules] == [route, route]
        assert "NeuronReduceMacroBwd" in program.modules[1].names
        assert "NeuronReduceMacroBwd" not in program.names


def test_two_shapes_of_one_macro_are_one_name():
    def twice(x, scale):
        return neuronjax.rms_norm(x, scale), neuronjax.rms_norm(x[:1], scale)

    for platforms in ("cpu", PLATFORMS):
        program = neuronjax.export(
            twice, normal(2, 8), jnp.ones(8), platforms=platforms
        )
        assert program.names == ("NeuronReduceMacro",)


def test_a_program_without_macros_says_so():
    with neuronjax.plain():
        program = norm(2, 8, platforms="cpu")
    assert (program.route, program.names) == ("none", ())
    assert "no macros" in str(program)


@pytest.mark.parametrize("platforms", ["cpu", PLATFORMS], ids=["one", "several"])
def test_values_and_gradients_are_those_of_the_function(platforms):
    x, scale = normal(3, 16), normal(16, seed=1)
    program = norm(3, 16, platforms=platforms, vjp=2)

    def loss(f):
        return lambda x, scale: jnp.sum(jnp.sin(f(x, scale)))

    true = neuronjax.rms_norm
    close(program.call(x, scale), true(x, scale))
    for got, wanted in zip(
        jax.grad(loss(program.call), (0, 1))(x, scale),
        jax.grad(loss(true), (0, 1))(x, scale),
        strict=True,
    ):
        close(got, wanted)

    def second(f):
        return jax.grad(lambda x: jnp.sum(jax.grad(loss(f))(x, scale) ** 2))(x)

    close(second(program.call), second(true))


def test_an_open_batch_takes_any_number_of_rows():
    program = norm(2, 16, symbolic=("b, ...", None), vjp=True)
    assert program.inputs == (("arg0", "f32[b,16]"), ("arg1", "f32[16]"))
    assert program.outputs == (("out", "f32[b,16]"),)
    scale = normal(16, seed=1)
    for rows in (1, 5):
        x = normal(rows, 16)
        close(program.call(x, scale), neuronjax.rms_norm(x, scale))
        got = jax.grad(lambda x: program.call(x, scale).sum())(x)
        close(got, jax.grad(lambda x: neuronjax.rms_norm(x, scale).sum())(x))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.zeros(x.shape[0].bit_length()),
        lambda x: x[: 3 if x.shape[0] > 4 else 2],
        lambda x: jnp.zeros(2 ** x.shape[0]),
    ],
)
def test_what_needs_a_fixed_size_says_so(f):
    x = jnp.ones((8, 3))
    assert neuronjax.export(f, x).vjp_order == 0
    with pytest.raises(NotImplementedError, match="export: <lambda> needs a fixed"):
        neuronjax.export(f, x, symbolic=("b, ...",))


def test_an_error_of_fixed_sizes_is_the_functions_own():
    with pytest.raises(AttributeError, match="no_such"):
        neuronjax.export(lambda x: x.no_such, jnp.ones(3))


def test_without_vjp_there_is_no_derivative():
    program = norm(2, 8)
    assert program.vjp_order == 0
    with pytest.raises(ValueError, match="No VJP is available"):
        jax.grad(lambda x: program.call(x, jnp.ones(8)).sum())(normal(2, 8))


def test_a_macro_without_a_derivative_says_why():
    @neuronjax.register_kernel("ExportedSign", no_derivative="a sign has no slope")
    def sign(x):
        return jnp.sign(x)

    x = jnp.ones(3)
    assert neuronjax.export(sign, x, platforms="cpu").names == ("ExportedSign",)
    assert neuronjax.export(sign, x).names == ("ExportedSign",)
    with pytest.raises(NotImplementedError, match="a sign has no slope"):
        neuronjax.export(sign, x, vjp=True)


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


def test_arguments_and_outputs_are_nested_plainly():
    def f(pair, table, tile):
        left, right = pair
        rows = [left + right, None, {2: table[10][0] * tile.data}]
        return Pair(tile, rows)

    pair = Pair(normal(2), normal(2, seed=1))
    table = {10: (jnp.float32(3.0),), 9: None}
    tile = neuronjax.MemrefTile.from_tensor(normal(4, 3))
    program = neuronjax.export(f, pair, table, tile)
    names = [name for name, _ in program.inputs]
    assert names == ["arg0.left", "arg0.right", "arg1.10.0", "arg2.data"]
    got = program.call(pair, table, tile)
    assert list(got) == ["left.data", "right.0", "right.2.2"]
    close(got["right.0"], pair.left + pair.right)
    close(got["right.2.2"], 3.0 * tile.data)
    plain = {"left": pair.left, "right": pair.right}
    again = program.exported.call(
        plain, {"10": (table[10][0],), "9": None}, {"data": tile.data}
    )
    jax.tree.map(close, got, again)


def test_the_order_of_keys_does_not_move_an_array():
    # As words "10" comes before "9", as numbers after.
    table = {i: jnp.full(2, float(i)) for i in (9, 10, 11)}
    program = neuronjax.export(lambda table: table[9] - table[10] * 2, table)
    close(program.call(table), table[9] - table[10] * 2)


def test_keys_that_read_alike_are_refused():
    class Key:
        def __str__(self):
            return "1"

        def __lt__(self, other):
            return False

    one, other = Key(), Key()
    with pytest.raises(ValueError, match="differ as words, got two that are '1'"):
        neuronjax.export(lambda table: table, {one: jnp.ones(2), other: jnp.ones(2)})


def test_a_module_is_exported_with_its_parameters_first():
    layer = nn.MLP(8, 16, rngs=nnx.Rngs(0))
    x = normal(2, 3, 8)
    program = neuronjax.export(layer, x, symbolic=("b, ...",), vjp=True)
    assert program.names == ("MLP",)
    parameters, _ = program.arguments(layer, x)
    assert all(isinstance(key, str) for key in parameters)
    assert {f"arg0.{key}" for key in parameters} < {name for name, _ in program.inputs}
    close(program.call(layer, x), layer(x))
    grown = normal(5, 3, 8)
    close(program.call(parameters, grown), layer(grown))
    graph, state = nnx.split(layer)

    def loss(state):
        return jnp.sum(nnx.merge(graph, state)(x) ** 2)

    got = jax.grad(lambda p: jnp.sum(program.call(p, x) ** 2))(parameters)
    wanted = program.arguments(jax.grad(loss)(state))[0]
    assert got.keys() == wanted.keys()
    jax.tree.map(close, got, wanted)


def test_a_module_may_be_any_argument():
    layer = nn.RMSNorm(8, eps=1e-5, rngs=nnx.Rngs(0))

    def loss(x, layer):
        return jnp.sum(layer(x) ** 2)

    x = normal(2, 8)
    program = neuronjax.export(loss, x, layer, platforms="cpu")
    assert program.inputs[1] == ("arg1.scale", "f32[8]")
    close(program.call(x, layer), loss(x, layer))


def test_a_training_step_is_one_program():
    """Parameters and moments go round: its outputs are the next step's arguments."""
    layer = nn.MLP(8, 16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    adam = optax.adam(1e-2)

    def step(state, moments, x):
        slope = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(x) ** 2))(state)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            update, moments = adam.update(slope, moments, state)
        return optax.apply_updates(state, update), moments

    moments, x = adam.init(state), normal(2, 3, 8)
    program = neuronjax.export(step, state, moments, x)
    assert {"MLP", "MLPBwd"} <= set(program.names)
    assert ("arg1.0.mu.up", "f32[8,16]") in program.inputs
    once = program.call(state, moments, x)
    again = program.exported.call(*once, x)
    wanted = step(*step(state, moments, x), x)
    jax.tree.map(close, again, program.arguments(*wanted))


def test_a_program_over_a_mesh_runs_on_as_many_devices():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    spec = P("data")
    sharded = jax.shard_map(
        neuronjax.rms_norm, mesh=mesh, in_specs=(spec, P()), out_specs=spec
    )
    x, scale = normal(4, 8), normal(8, seed=1)
    program = neuronjax.export(sharded, x, scale, platforms="cpu")
    assert program.exported.nr_devices == 2 and "devices" in str(program)
    assert program.names == ("NeuronReduceMacro",)
    placed = jax.device_put((x, scale), jax.NamedSharding(mesh, P()))
    close(program.call(*placed), neuronjax.rms_norm(x, scale))


def test_a_file_is_read_back(tmp_path):
    program = norm(2, 8, vjp=True)
    path = program.save(tmp_path / "norm.jaxexport")
    again = neuronjax.ExportedProgram.load(path)
    assert again == program and again.vjp_order == 1
    assert again.names == ("NeuronReduceMacro",)
    assert [p.name for p in tmp_path.iterdir()] == ["norm.jaxexport"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    program = neuronjax.export(jnp.sin, jnp.ones(2))
    with pytest.raises(FileNotFoundError, match="no: expected a folder, none is there"):
        program.save(tmp_path / "no" / "x.bin")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "norm.jaxexport"
    path.write_bytes(b"before")

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        norm(2, 8).save(path)
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["norm.jaxexport"]


@pytest.mark.parametrize(
    "cut",
    [
        lambda blob: b"",
        lambda blob: b"no program",
        lambda blob: blob[: len(blob) // 2],
        lambda blob: blob[:-64],
        lambda blob: blob.replace(b"ML\xefR", b"XXXX"),
    ],
)
def test_a_file_that_holds_no_program_is_refused(tmp_path, cut):
    path = tmp_path / "bad.jaxexport"
    path.write_bytes(cut(norm(2, 8).blob))
    with pytest.raises(ValueError, match=r"bad.jaxexport: expected a program of"):
        neuronjax.ExportedProgram.load(path)


@pytest.mark.parametrize(
    ("platforms", "words"),
    [
        ("gpu", "a GPU is cuda or rocm"),
        ((), "each once"),
        (("cpu", "cpu"), "each once"),
    ],
)
def test_platforms_that_do_not_exist_are_refused(platforms, words):
    with pytest.raises(ValueError, match=f"export: platforms must be .*{words}"):
        norm(2, 8, platforms=platforms)


@pytest.mark.parametrize("vjp", [-1, "yes", 1.5])
def test_an_order_of_derivatives_that_is_none_is_refused(vjp):
    with pytest.raises(ValueError, match="export: vjp must be True, False, or how"):
        norm(2, 8, vjp=vjp)


def test_a_setting_among_the_arguments_is_refused():
    with pytest.raises(ValueError, match="must be arrays .*, got str: close over"):
        neuronjax.export(neuronjax.rms_norm, normal(2, 8), "scale")


def test_settings_are_closed_over():
    call = functools.partial(neuronjax.rms_norm, eps=1e-2)
    x, scale = normal(2, 8), jnp.ones(8)
    program = neuronjax.export(call, x, scale)
    assert program.exported.fun_name == "rms_norm"
    close(program.call(x, scale), call(x, scale))


def test_a_custom_call_must_be_answered_for():
    def f(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("SomeVendorsKernel", out)(x)

    with pytest.raises(ValueError, match="SomeVendorsKernel"):
        neuronjax.export(f, jnp.ones(3), platforms="tpu")
    program = neuronjax.export(
        f, jnp.ones(3), platforms="tpu", custom_calls=["SomeVendorsKernel"]
    )
    assert "SomeVendorsKernel" in program.modules[0].text
