"""Exported programs where they are read, and the pages that tell of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import neuronjax
from neuronjax import nn
from tests.export_case import close, norm, normal

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Reads a file where neither this package nor anything but jax's own needs is installed.
ALONE = """
import importlib.abc, importlib.machinery, sys

ALLOWED = {"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum", "flatbuffers"}

class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        known = top in ALLOWED or top in sys.stdlib_module_names
        if known or top.startswith("_sysconfigdata"):
            return None
        if importlib.machinery.PathFinder.find_spec(name, path) is not None:
            raise ModuleNotFoundError(f"walled off: {name}", name=name)

sys.meta_path.insert(0, Wall())
"""


def test_a_program_for_trainium_is_written_here_and_refused_here():
    program = norm(2, 8, platforms="neuron")
    assert (program.platforms, program.route) == (("neuron",), "composite")
    with pytest.raises(ValueError, match="exported for platforms .*neuron"):
        program.call(normal(2, 8), jnp.ones(8))


def run(code, *arguments):
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_reader_needs_jax_and_flatbuffers_alone(tmp_path):
    """The loader's lines, of a model with its weights, where nothing else is found."""
    layer = nn.MLP(8, 16, rngs=nnx.Rngs(0))
    x = normal(2, 3, 8)
    program = neuronjax.export(layer, x, symbolic=("b, ...",), vjp=True)
    path = program.save(tmp_path / "mlp.jaxexport")
    weights = tmp_path / "mlp.npz"
    np.savez(weights, **program.arguments(layer)[0])
    np.save(tmp_path / "x.npy", x)
    start, read, use = program.loader(path).splitlines()
    assert use == "out = program.call(arg0, arg1)"
    code = f"""{ALONE}
import json, numpy
{start}
arg0 = dict(numpy.load({json.dumps(str(weights))}))
arg1 = numpy.load({json.dumps(str(tmp_path / "x.npy"))})
{read}
{use}
slope = jax.grad(lambda x: (program.call(arg0, x) ** 2).sum())(arg1)
try:
    import neuronjax
except ModuleNotFoundError as error:
    print(json.dumps([out.tolist(), slope.tolist(), str(error)]))
"""
    out, slope, error = json.loads(run(code))
    assert error == "walled off: neuronjax"
    close(out, layer(x))
    close(slope, jax.grad(lambda x: (layer(x) ** 2).sum())(x))


def test_a_reader_runs_composites_and_tiles(tmp_path):
    """Composites that a compiler does not know run as what they are made of."""
    tile = neuronjax.MemrefTile.from_tensor(normal(4, 3))
    program = neuronjax.export(neuronjax.transpose, tile, platforms="cpu")
    assert (program.route, program.names) == ("composite", ("Transpose",))
    path = program.save(tmp_path / "transpose.jaxexport")
    start, read, use = program.loader(path).splitlines()
    values = np.asarray(tile.data).tolist()
    code = f"""{ALONE}
import json
{start}
arg0 = {{"data": jax.numpy.asarray({values})}}
{read}
{use}
print(json.dumps(out["data"].tolist()))
"""
    close(json.loads(run(code)), neuronjax.transpose(tile).data)


def test_the_page_shows_what_it_prints(tmp_path, monkeypatch, capsys):
    page = (DOCS / "export.md").read_text()
    (code, *_), (table, *_) = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.S) for kind in ("python", "text")
    )
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    shown, printed = table.split("\n"), capsys.readouterr().out.split("\n")
    assert printed[1:] == shown[1:]
    # The size of the file depends on the version of JAX.
    assert re.sub(r"[\d.]+ kB", "", printed[0]).strip() in shown[0]
    assert neuronjax.ExportedProgram.load("norm.jaxexport").vjp_order == 1


def test_the_lowering_of_the_docs_reaches_a_custom_call():
    """The recipe of docs/on_trainium.md, on a platform that JAX knows without a plugin.

    JAX refuses a lowering for `neuron` until its plugin is there.
    """
    page = (DOCS / "on_trainium.md").read_text()
    (recipe,) = re.findall(r"```python\n(# bind.*?)```", page, re.S)
    assert recipe.count('platform="neuron"') == 1
    refused = run(
        f"try:\n    exec({recipe!r})\n"
        "except NotImplementedError as error:\n    print(error)"
    )
    assert "unknown platform neuron" in refused
    code = recipe.replace('platform="neuron"', 'platform="cuda"') + (
        "x = jax.ShapeDtypeStruct((8, 1, 2, 8), 'float32')\n"
        "t = jax.ShapeDtypeStruct((4, 1, 8), 'float32')\n"
        "import neuronjax\n"
        "for platform in ('cuda', 'tpu'):\n"
        "    bound = neuronjax.export(neuronjax.RoPE, x, t, t, platforms=platform,\n"
        "        custom_calls=['AwsNeuronCustomNativeKernel'])\n"
        "    print('AwsNeuronCustomNativeKernel' in bound.modules[0].text)\n"
        "def mapped(x):\n"
        "    return jax.vmap(lambda x: neuronjax.RoPE(x, *tables))(x)\n"
        "tables = jax.numpy.ones((4, 1, 8)), jax.numpy.ones((4, 1, 8))\n"
        "many = jax.ShapeDtypeStruct((3, 8, 1, 2, 8), 'float32')\n"
        "print('Aws' in neuronjax.export(\n"
        "    mapped, many, platforms='cuda').modules[0].text)\n"
    )
    assert run(code).split() == ["True", "False", "False"]
