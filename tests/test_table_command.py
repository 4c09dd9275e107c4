"""`neuronjax table`: the transformation table at the command line."""

import jax
import pytest
from typer.testing import CliRunner

from neuronjax.tools.cli import app

KERNEL = """
import jax.numpy as jnp
import neuronjax

def example(dtype, batch):
    return jnp.ones((batch, 3), dtype)

neuronjax.register_kernel("Tabled", lambda x: x * x, example=example)
neuronjax.register_kernel(
    "Skewed", lambda x: x * x, plain=lambda x: x + 1, example=example
)
"""


@pytest.fixture
def invoke(tmp_path):
    """Runs the command; the compiler's setting is put back."""
    held = jax.config.read("jax_disable_most_optimizations")
    source = tmp_path / "tabled_kernels.py"
    source.write_text(KERNEL)

    def run(*arguments):
        words = [str(a).replace("SOURCE", str(source)) for a in arguments]
        return CliRunner().invoke(app, ["table", *words])

    yield run
    jax.config.update("jax_disable_most_optimizations", held)


def test_a_kernel_of_a_file_is_checked(invoke):
    done = invoke("Tabled", "--from", "SOURCE", "--only", "jit", "--only", "grad")
    assert done.exit_code == 0, done.output
    assert "Tabled: 2 green" in done.output


def test_a_red_cell_is_exit_status_1(invoke):
    done = invoke("Tabled", "Skewed", "--from", "SOURCE", "--only", "jit")
    assert done.exit_code == 1
    assert "Tabled: 1 green" in done.output and "Skewed: 1 red" in done.output
    assert "of the plain reference" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("RoPee",), "got 'RoPee'; near matches: RoPE"),
        (("CumSum", "--only", "jix"), "got 'jix'"),
        (("CumSum", "--from", "no_such_module"), "there is no module no_such_module"),
        (("CumSum", "--from", "none.py"), "there is no file none.py"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(invoke, arguments, words):
    done = invoke(*arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("neuronjax: ") and words in line
