"""`neuronjax.diff`: two macro tables side by side."""

import functools
import io

import jax
import jax.numpy as jnp
import pytest
import rich.console
from typer.testing import CliRunner

import neuronjax
from neuronjax.tools.cli import app
from tests.tiny_checkpoints import CONFIG, random_tensors, write_folder

X = jax.ShapeDtypeStruct((4, 64), "float32")
SCALE = jax.ShapeDtypeStruct((64,), "float32")
norm = neuronjax.rms_norm


def twice(x, scale):
    return norm(norm(x, scale), scale)


def kinds(difference):
    return [(row.name, row.kind) for row in difference.rows]


def test_alike_functions_do_not_differ():
    difference = neuronjax.diff(norm, norm, X, SCALE)
    assert not difference and difference.differing == ()
    assert kinds(difference) == [("NeuronReduceMacro", "same")]
    assert "A and B emit the same macros" in str(difference)


def test_no_name_is_folded_in_a_narrow_terminal():
    """Both sides stand in one column, and an absent one is a dash."""
    q = jax.ShapeDtypeStruct((8, 256, 64), "float32")

    def attention(causal):
        def call(q):
            return neuronjax.attention_cte(q, q, q, tp_k=True, causal_mask=causal)

        return call

    difference = neuronjax.diff(attention(True), attention(False), q)
    console = rich.console.Console(width=80, record=True, file=io.StringIO())
    console.print(difference)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "CausalAttentionMMSoftmaxMMWithoutSwap" in text
    assert "1 → -" in text and "- → 1" in text


def test_counts_differ():
    difference = neuronjax.diff(norm, twice, X, SCALE, titles=("one", "two"))
    assert difference
    (row,) = difference.rows
    assert (row.kind, row.a.count, row.b.count, row.changes) == ("count", 1, 2, ())
    text = str(difference)
    assert "one and two differ in 1 row" in text
    size = norm(jnp.ones(X.shape), jnp.ones(SCALE.shape)).nbytes
    assert row.a.bytes >= 2 * size and row.a.bytes == row.b.bytes
    # The last line sums: bytes of two are twice those of one.
    cells = [cell.strip() for cell in text.splitlines()[-2].split("│")]
    one, two = (float(cell) for cell in cells[-3:-1])
    assert two == pytest.approx(2 * one, rel=1e-2) and two > 0


def test_settings_differ():
    other = functools.partial(norm, eps=1e-3)
    (row,) = neuronjax.diff(norm, other, X, SCALE).rows
    assert (row.kind, row.changes) == ("changed", ("eps 1e-06 → 0.001",))


def test_operands_differ():
    def narrow(x, scale):
        return norm(x[:, :32], scale[:32])

    difference = neuronjax.diff(norm, narrow, X, SCALE)
    (row,) = difference.rows
    assert (row.kind, row.changes) == ("changed", ())
    assert "f32[4,64], f32[64] → f32[4,32], f32[32]" in str(difference)


def test_what_only_one_has():
    def other(x, scale):
        return neuronjax.transpose(norm(x, scale))

    forth = neuronjax.diff(norm, other, X, SCALE)
    assert kinds(forth) == [("NeuronReduceMacro", "same"), ("Transpose", "only b")]
    back = neuronjax.diff(other, norm, X, SCALE)
    assert ("Transpose", "only a") in kinds(back)
    assert str(forth).count(">") == 1 and str(back).count("<") == 1


def test_alike_rows_find_each_other_before_the_rest_is_paired():
    def a(x, scale):
        return norm(x[:3], scale), norm(x[:2], scale), norm(x[:1], scale)

    def b(x, scale):
        return norm(x[:1], scale), norm(x, scale)

    rows = neuronjax.diff(a, b, X, SCALE).rows
    found = sorted(
        (row.kind, row.a and row.a.shapes[0], row.b and row.b.shapes[0]) for row in rows
    )
    assert found == [
        ("changed", "f32[3,64]", "f32[4,64]"),
        ("only a", "f32[2,64]", None),
        ("same", "f32[1,64]", "f32[1,64]"),
    ]


def test_mapped_and_tiled_forms_are_other_rows():
    def mapped(x, scale):
        return jax.vmap(norm, (0, None))(x, scale)

    (row,) = neuronjax.diff(norm, mapped, X, SCALE).rows
    assert row.kind == "changed" and "vmap 0 → 1" in row.changes
    tile = neuronjax.MemrefTile.from_tensor(jnp.ones((128, 4)))
    tensor = neuronjax.trace(neuronjax.transpose, jnp.ones((128, 4)))
    tiled = neuronjax.trace(neuronjax.transpose, tile)
    (row,) = neuronjax.diff(tensor, tiled).rows
    assert row.kind == "changed" and "tensors → tiles" in row.changes


def test_gradients_and_tables_are_compared_too():
    def loss(f):
        return jax.grad(lambda x, scale: f(x, scale).sum())

    table = neuronjax.trace(loss(norm), X, SCALE)
    assert not neuronjax.diff(table, loss(norm), X, SCALE)
    difference = neuronjax.diff(table, loss(twice), X, SCALE)
    counts = {row.name: (row.a.count, row.b.count) for row in difference.rows}
    assert counts["NeuronReduceMacroBwd"] == (1, 2)


def test_arguments_for_two_tables_are_refused():
    table = neuronjax.trace(norm, X, SCALE)
    with pytest.raises(ValueError, match="diff: arguments are for functions"):
        neuronjax.diff(table, table, X)


def invoke(*arguments):
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny") / "model", random_tensors())


def test_the_command_compares_models_without_weights(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    same = invoke(folder, tmp_path, "--seq", 8)
    assert same.exit_code == 0, same.output
    assert same.stdout.count("A and B emit the same macros") == 2
    assert "one decode step after 8 tokens" in same.stdout
    other = invoke(folder, folder, "--seq", 8, "--dtype-b", "bfloat16")
    assert other.exit_code == 1, other.output
    assert "A and B differ in 5 rows" in other.stdout
    assert f"bf16[1,8,{CONFIG.d_model}]" in other.stdout.replace("\n", "")


def test_the_command_compares_macros():
    assert invoke("RoPE", "rope_hf").exit_code == 0
    result = invoke("RoPE", "Transpose", "--gradient")
    assert result.exit_code == 1
    assert "RoPEBwd" in result.stdout and "Transpose" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("RoPE", "Rope5"), "nor is it a NAME or function, near RoPE"),
        (("RoPE", "FOLDER"), "expected two models or two macros"),
        (("RoPE", "qkv"), "emits several macros: take one of"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, arguments, words):
    result = invoke(*(folder if word == "FOLDER" else word for word in arguments))
    assert result.exit_code == 2
    assert words in result.stderr and len(result.stderr.splitlines()) == 1
