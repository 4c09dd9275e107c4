"""`neuronjax export`: macros, models, weights, mistakes."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import neuronjax
from neuronjax.models.cache import Cache
from neuronjax.models.pretrained import load_pretrained
from neuronjax.primitives.macro import Example
from neuronjax.tools.cli import app
from neuronjax.tools.export import subjects
from neuronjax.tools.transformations.case import MacroCase
from tests.tiny_checkpoints import CONFIG, random_tensors, write_folder

TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], jnp.int32)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def invoke(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def exported(*arguments):
    """What the command writes; it ends well."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return neuronjax.ExportedProgram.load(arguments[arguments.index("--out") + 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny") / "model", random_tensors())


@pytest.fixture(scope="module")
def model(folder):
    return load_pretrained(folder).model


def test_a_macro_is_exported_on_its_example(tmp_path):
    out = tmp_path / "rope.jaxexport"
    program = exported("RoPE", "--out", out, "--vjp", "--symbolic")
    assert program.names == ("RoPE",) and "RoPEBwd" in program.modules[1].names
    for batch in (2, 3):
        case = MacroCase("RoPE", batch=batch)
        jax.tree.map(close, program.call(*case.flat), case.reference(*case.flat))


def test_a_function_of_one_macro_stands_for_it(tmp_path):
    out = tmp_path / "cumsum.jaxexport"
    program = exported("cumsum", "--out", out, "--platform", "tpu")
    assert program.names == ("CumSum",) and program.platforms == ("tpu",)


def test_the_result_says_route_names_and_how_to_read_it(tmp_path):
    out, text = tmp_path / "rope.jaxexport", tmp_path / "rope.mlir"
    result = invoke("RoPE", "--out", out, "--text", text, "--platform", "cpu")
    assert "composites neuron.RoPE" in result.stdout
    assert 'stablehlo.composite "neuron.RoPE"' in text.read_text()
    code = result.stdout[result.stdout.index("import jax.export") :]
    case = MacroCase("RoPE")
    arrays = [np.asarray(x).tolist() for x in case.flat]
    code = f"import numpy\narg0, arg1, arg2 = map(numpy.float32, {arrays})\n" + code
    code = code.replace("numpy.float32", "lambda x: numpy.asarray(x, 'float32')")
    code += "\nprint(out[0].tolist())"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    close(np.asarray(eval(printed)), case.reference(*case.flat)[0])
    inline = invoke("RoPE", "--out", out, "--inline", "--platform", "cpu")
    assert "functions RoPE" in inline.stdout


def test_cooperating_cores_are_exported_for_two_devices(tmp_path):
    out = tmp_path / "matmul.jaxexport"
    program = exported("CollectiveMatmul", "--out", out)
    assert program.exported.nr_devices == 2
    assert program.names == ("CollectiveMatmul",)


def test_a_model_runs_on_the_weights_that_are_written(folder, model, tmp_path):
    out, weights = tmp_path / "model.jaxexport", tmp_path / "model.npz"
    arguments = (folder, "--out", out, "--seq", 8, "--symbolic", "--weights", weights)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert f'dict(numpy.load("{weights}"))' in result.stdout
    program = neuronjax.ExportedProgram.load(out)
    assert "CausalAttentionMMSoftmaxMMWithoutSwap" in program.names
    parameters = dict(np.load(weights))
    for rows in (1, 2):
        tokens = TOKENS[:rows]
        close(program.exported.call(parameters, tokens), model(tokens))


def test_the_gradient_of_a_model(folder, model, tmp_path):
    out = tmp_path / "model.jaxexport"
    program = exported(folder, "--out", out, "--seq", 8, "--batch", 2, "--vjp")
    assert {"BackwardsAttention", "QKVBwd", "MLPBwd"} <= set(program.modules[1].names)
    graph, state = nnx.split(model)
    parameters = program.arguments(model)[0]
    got = jax.grad(lambda p: jnp.sum(program.call(p, TOKENS) ** 2))(parameters)
    wanted = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(TOKENS) ** 2))(state)
    wanted = program.arguments(wanted)[0]
    assert got.keys() == wanted.keys()
    for key in got:
        scale = np.abs(wanted[key]).max()
        np.testing.assert_allclose(got[key], wanted[key], rtol=1e-3, atol=1e-4 * scale)


def test_prefill_and_decode_hand_the_cache_on(folder, model, tmp_path):
    prefill, decode = tmp_path / "prefill.jaxexport", tmp_path / "decode.jaxexport"
    sizes = ("--symbolic", "--slots", 12)
    first = exported(folder, "--out", prefill, "--phase", "prefill", "--seq", 8, *sizes)
    then = exported(folder, "--out", decode, "--phase", "decode", *sizes)
    assert "AttentionTkgFwd" in then.names
    parameters = first.arguments(model)[0]
    lengths = jnp.array([8, 5], jnp.int32)
    logits, cache = first.exported.call(parameters, TOKENS, lengths)
    wanted, held = model.prefill(TOKENS, lengths, 12)
    close(logits, wanted)
    assert isinstance(held, Cache) and set(cache) == set(first.arguments(held)[0])
    token = jnp.argmax(logits, -1)[:, None].astype(jnp.int32)
    logits, cache = then.exported.call(parameters, token, cache)
    wanted, held = model.decode(token, held)
    close(logits, wanted)
    np.testing.assert_array_equal(cache["lengths"], held.lengths)


def test_one_layer(folder, model, tmp_path):
    out = tmp_path / "layer.jaxexport"
    program = exported(folder, "--out", out, "--phase", "layer", "--seq", 4)
    x = jax.random.normal(jax.random.key(0), (1, 4, CONFIG.d_model))
    tables = jnp.ones((2, 1, 4, CONFIG.head_dim))
    layer = model.layers[0]
    close(program.call(layer, x, *tables), layer(x, *tables))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Rope5",), "nor is it a NAME or function, near RoPE"),
        (("qkv",), "emits several macros: take one of"),
        (("RoPE", "--platform", "gpu"), "a GPU is cuda or rocm"),
        (("RoPE", "--composites"), "fixed sizes and one platform"),
        (("RoPE", "--weights", "w.npz"), "RoPE is a macro and has none"),
        (("FOLDER", "--weights", "w.bin"), "ends in .npz, got w.bin"),
        (("FOLDER", "--weights", "w.npz", "--dtype", "bfloat16"), "has float16"),
        (("FOLDER", "--weights", "w.npz", "--phase", "layer"), "of the whole model"),
        (("FOLDER", "--phase", "prefill", "--slots", "4"), "at least --seq = 128"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, tmp_path, arguments, words):
    named = [folder if word == "FOLDER" else word for word in arguments]
    result = invoke(*named, "--out", tmp_path / "x.jaxexport")
    assert result.exit_code == 2
    assert words in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "x.jaxexport").exists()


def test_an_example_without_a_batch_axis_has_no_open_size(monkeypatch):
    def fixed(family, label, dtype, size, seed):
        return Example((jnp.ones((4, 2)),), {}, (None,), (None,))

    monkeypatch.setattr(subjects, "example_of", fixed)
    with pytest.raises(ValueError, match="--symbolic: the example of RoPE has no"):
        subjects.of_op("RoPE", "float32", symbolic=True)


def test_help_tells_the_options():
    result = CliRunner().invoke(app, ["export", "--help"], env={"COLUMNS": "200"})
    words = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    for option in ("--platform", "--vjp", "--symbolic", "--composites", "--weights"):
        assert option in words
