"""What an installed wheel must do, away from the repository.

`python -I tests/smoke_wheel.py`, in an environment that has the wheel and nothing else
of the project; with `--extras` also what its extras bring. `-I` keeps this folder and
the current one out of the imports.
"""

import contextlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.prefix) / "bin" / "neuronjax"


def command(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    """Runs `neuronjax`, which must end with `code`."""
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    said = f"neuronjax {' '.join(arguments)}: {done.returncode}\n{done.stderr}"
    assert done.returncode == code, said
    return done


def the_package_is_the_wheels() -> None:
    import neuronjax

    place = Path(neuronjax.__file__).resolve()
    assert REPOSITORY / "neuronjax" not in place.parents, place
    assert neuronjax.__version__ == importlib.metadata.version("neuronjax")
    installed = importlib.metadata.files("neuronjax") or []
    assert {f.parts[0].split("-")[0] for f in installed} <= {"neuronjax", ".."}


def its_data_came_along() -> None:
    package = resources.files("neuronjax")
    data = "py.typed data/sonnets.txt tools/html/page.css tools/html/page.js".split()
    for name in [*data, "tools/html/theme.css"]:
        assert (package / name).is_file(), name
    assert len((package / "data/sonnets.txt").read_text("ascii")) > 90_000


def the_command_starts() -> None:
    assert command("--version").stdout.startswith("neuronjax ")
    assert "gradcheck" in command("--help").stdout
    assert "■" in command("draw", "attention", "4").stdout
    assert command("tran", code=2).stderr.count("\n") == 1


def a_macro_runs_forwards_and_backwards() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import neuronjax

    x, scale = jax.random.normal(jax.random.key(0), (3, 8)), jnp.ones(8)
    y = np.asarray(neuronjax.rms_norm(x, scale, eps=0.0), np.float64)
    np.testing.assert_allclose((y**2).mean(-1), 1, rtol=1e-5)
    dx = jax.grad(lambda x: neuronjax.rms_norm(x, scale, eps=0.0).sum())(x)
    # A norm does not see its operand's length: the gradient is across the operand.
    np.testing.assert_allclose((dx * x).sum(-1), 0, atol=1e-5)
    assert abs(dx).max() > 0.1


def a_trace_becomes_a_page() -> None:
    import jax.numpy as jnp

    import neuronjax

    traced = neuronjax.trace(neuronjax.rms_norm, jnp.ones((3, 8)), jnp.ones(8))
    traced.to_html("page.html")
    page = Path("page.html").read_text("utf-8")
    assert "NeuronReduceMacro" in page and "<script" in page and "<style" in page


def a_macro_is_verified() -> None:
    assert "float64" in command("verify", "CumSum").stdout


def an_exported_macro_is_read_by_jax_alone() -> None:
    command("export", "CumSum", "--out", "cumsum.bin")
    code = (
        "import jax.export, jax.numpy as jnp, pathlib, sys\n"
        "read = jax.export.deserialize(pathlib.Path('cumsum.bin').read_bytes())\n"
        "ones = [jnp.ones(x.shape, x.dtype) for x in read.in_avals]\n"
        "out = jax.tree.leaves(read.call(*ones))[0]\n"
        "assert (out[..., :3] == jnp.array([1, 2, 3], out.dtype)).all(), out\n"
        "assert 'neuronjax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


def what_an_extra_lacks_is_one_line() -> None:
    for arguments in (["demo", "--steps", "2"], ["run", "smollm2", "Hi"]):
        said = command(*arguments, code=2).stderr
        assert said.count("\n") == 1 and "pip install 'neuronjax[" in said, said


def the_demo_trains() -> None:
    done = command("demo", "--steps", "2", "--out", "demo")
    for words in ("Before", "After", "LinearCrossEntropyBwd"):
        assert words in done.stdout, done.stdout
    for name in ("loss.png", "log.jsonl", "checkpoints/2"):
        assert (Path("demo") / name).exists(), name


def a_picture_is_a_file() -> None:
    command("draw", "attention", "4", "--out", "mask.svg")
    assert Path("mask.svg").read_text("utf-8").count("query")


WHEEL = [
    the_package_is_the_wheels,
    its_data_came_along,
    the_command_starts,
    a_macro_runs_forwards_and_backwards,
    a_trace_becomes_a_page,
    a_macro_is_verified,
    an_exported_macro_is_read_by_jax_alone,
    what_an_extra_lacks_is_one_line,
]
EXTRAS = [the_demo_trains, a_picture_is_a_file]


def main(*flags: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["NEURONJAX_CACHE"] = folder  # no model that was fetched before
        for step in EXTRAS if "--extras" in flags else WHEEL:
            step()
            print(f"ok: {step.__name__.replace('_', ' ')}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
