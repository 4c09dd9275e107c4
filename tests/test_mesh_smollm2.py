"""SmolLM2 (9 query and 3 key heads): ranks and cores say what one device says."""

import json
import pathlib

import numpy as np
import pytest

from neuronjax.models.checkpoint import read_checkpoint
from neuronjax.models.load import load_llama
from neuronjax.models.mesh_decoder import MeshDecoder
from neuronjax.sharding import make_mesh

FOLDER = pathlib.Path(__file__).parent / "cases" / "smollm2"
CASES = json.loads((FOLDER / "index.json").read_text())


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_llama(*read_checkpoint(smollm2_path), scan_layers=True)


@pytest.fixture(scope="module")
def prompts_and_greedy():
    """Prompts of different lengths, and the tokens of the reference behind them."""
    with np.load(FOLDER / "logits.npz") as stored:
        cases = [case for case in CASES if not case.startswith("chat")]
        return [
            [stored[f"{case}_{name}"].tolist() for case in cases]
            for name in ("ids", "greedy")
        ]


@pytest.fixture(scope="module")
def on_one_device(model, prompts_and_greedy):
    prompts, greedy = prompts_and_greedy
    return model.generate(prompts, max_tokens=max(map(len, greedy)), eos_ids=())


@pytest.mark.parametrize("in_sbuf", [False, True], ids=["hbm", "sbuf"])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_text_is_that_of_one_device_and_of_the_reference(
    ranks, cores, in_sbuf, model, prompts_and_greedy, on_one_device
):
    prompts, greedy = prompts_and_greedy
    mesh = make_mesh(tensor=ranks, lnc=cores)
    decoder = MeshDecoder(model, mesh, sbuf_residual_and_cc=in_sbuf)
    count = max(map(len, greedy))
    made = decoder.generate(prompts, max_tokens=count, eos_ids=())
    assert made == on_one_device
    for tokens, wanted in zip(made, greedy, strict=True):
        assert tokens[: len(wanted)] == wanted
