"""Training: the loss falls, runs resume to the bit and on other meshes."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from neuronjax.primitives import registry
from neuronjax.tools import demo_commands
from neuronjax.tools.cli import app
from neuronjax.tools.trace import inner_jaxprs
from neuronjax.tools.train.blueprint import Blueprint
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.loop import train
from neuronjax.tools.train.macros import step_macros
from neuronjax.tools.train.objective import next_token_loss
from neuronjax.tools.train.run import finished, load_run
from neuronjax.tools.train.sample import sample
from neuronjax.tools.train.stepping import Stepping
from neuronjax.tools.train.store import Store
from tests.train_case import TINY, arrays, config, losses, straight, text

__all__ = ["straight", "text"]  # fixtures
EXPERTS = dict(experts=4, experts_per_token=2, shared_d_ff=8, d_ff=8)
MESH = dict(data=2, tensor=2, lnc=2)


def stop_at(step):
    def watch(record):
        if record.step == step:
            raise KeyboardInterrupt

    return watch


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """The folder of the same run, stopped after step 23."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        train(config(folder, text), watch=stop_at(23))
    return folder


def test_the_loss_falls(straight):
    assert abs(losses(straight)[0] - np.log(256)) < 0.3
    assert losses(straight)[-1] < 1.5
    scored = [r.validation for r in straight.records if r.validation is not None]
    assert len(scored) == 6 and scored[-1] < 1.5 < scored[0]


def test_two_checkpoints_stay(straight):
    assert finished(straight.config.out) == [50, 60]


def test_a_resumed_run_is_the_same_to_the_bit(straight, stopped, text, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    assert finished(folder) == [10, 20]
    resumed = train(config(folder, text), resume=True)
    assert resumed.began == 20
    np.testing.assert_array_equal(losses(resumed), losses(straight))
    jax.tree.map(
        np.testing.assert_array_equal, arrays(folder), arrays(straight.config.out)
    )


def test_a_run_goes_on_over_a_mesh_and_its_model_runs_on_one_device(
    straight, stopped, text, tmp_path
):
    folder = shutil.copytree(stopped, tmp_path / "run")
    resumed = train(config(folder, text, **MESH), resume=True)
    assert resumed.began == 20 and len(resumed.records) == 60
    np.testing.assert_allclose(losses(resumed), losses(straight), rtol=2e-3)
    model, saved = load_run(folder)
    assert saved == resumed.config
    assert {len(x.devices()) for x in jax.tree.leaves(model_state(model))} == {1}
    said = sample(model, "the", tokens=40, temperature=0.0)
    assert said.startswith("the") and len(said) == 43
    # Back onto one device: the moments of a mesh are whole.
    again = train(config(folder, text, steps=62), resume=True)
    assert again.began == 60 and again.records[-1].loss < 1.5


def model_state(model):

    return nnx.state(model)


def test_weights_and_moments_are_divided_as_the_layers_name_it():
    blueprint = Blueprint(TrainConfig(**TINY | MESH))
    shardings = blueprint.shardings
    layer = shardings["layers"]
    assert layer["mlp"]["gate"].spec == P(None, None, ("tensor", "lnc"))
    assert layer["mlp"]["down"].spec == P(None, ("tensor", "lnc"), None)
    assert layer["attention"]["qkv"].spec == P(None, None, ("tensor", "lnc"))
    assert shardings["embedding"].spec == P(("tensor", "lnc"), None)
    assert shardings["norm"]["scale"].spec == P()
    adam = Stepping(blueprint).shardings[1][0]
    assert adam.mu == adam.nu == shardings and adam.count.spec == P()


def test_the_first_weights_do_not_depend_on_the_mesh():
    one, many = (Blueprint(TrainConfig(**TINY | mesh)).params() for mesh in ({}, MESH))
    jax.tree.map(np.testing.assert_array_equal, one, many)


def windows():
    return jax.random.randint(jax.random.key(1), (8, 17), 0, 256, jnp.int32)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ({}, MESH),
        (EXPERTS, dict(data=2, tensor=2, expert=2)),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(model, mesh):
    def gradient(**changes):
        stepping = Stepping(Blueprint(TrainConfig(**TINY | model | changes)))
        return jax.jit(stepping.gradient)(stepping.blueprint.params(), windows())

    ((total, (loss, balance)), grads) = gradient()
    ((total_m, (loss_m, balance_m)), grads_m) = gradient(**mesh)
    np.testing.assert_allclose(
        [total_m, loss_m, balance_m], [total, loss, balance], rtol=1e-5
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6),
        grads_m,
        grads,
    )


def test_the_loss_is_that_of_the_logits():
    blueprint = Blueprint(TrainConfig(**TINY))
    model, tokens = blueprint.model(blueprint.params()), windows()
    each = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    np.testing.assert_allclose(
        next_token_loss(model, None, tokens)[0], each.mean(), rtol=1e-6
    )
    weights = jnp.array([1, 0, 1, 0, 0, 0, 0, 0], jnp.float32)
    np.testing.assert_allclose(
        next_token_loss(model, None, tokens, weights)[0], each[:3:2].mean(), rtol=1e-6
    )


def plain_products(jaxpr: Jaxpr) -> int:
    """Products outside of every macro."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in registry.FAMILIES:
            continue
        count += eqn.primitive.name in ("dot_general", "conv_general_dilated")
        count += sum(map(plain_products, inner_jaxprs(eqn)))
    return count


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            {},
            "QKV CausalAttentionMMSoftmaxMMWithoutSwap OutputProjection MLP "
            "NeuronReduceMacro LinearCrossEntropy LinearCrossEntropyBwd "
            "NeuronReduceMacroBwd MLPBwd OutputProjectionBwd BackwardsAttention QKVBwd",
        ),
        (EXPERTS, "RouterTopK RouterTopKBwd BlockwiseMM BlockwiseMMBwd MLPBwd QKVBwd"),
    ],
)
@pytest.mark.parametrize("mesh", [{}, MESH])
def test_every_block_and_the_loss_is_a_macro(model, names, mesh):
    c = TrainConfig(**TINY | dict(layers=2) | model | mesh)
    table = step_macros(c)
    assert set(names.split()) <= set(table.names)
    assert table.count("QKV") == table.count("QKVBwd") == c.layers
    stepping = Stepping(Blueprint(c))
    jaxpr = jax.make_jaxpr(stepping.gradient)(stepping.blueprint.shapes, windows())
    assert plain_products(jaxpr.jaxpr) == 0


def test_experts_learn_over_a_mesh(text, tmp_path):
    mesh = dict(data=2, expert=2, lnc=2)
    c = config(tmp_path, text, **EXPERTS, **mesh, save_every=60)
    trained = train(c)
    assert losses(trained)[-1] < 2.5 < 5 < losses(trained)[0]
    assert all(record.balance >= 0.99 for record in trained.records)
    model, _ = load_run(tmp_path)
    assert len(sample(model, "the", tokens=8)) == 11


def test_bfloat16_arithmetic_learns_in_float32_weights(text, tmp_path):
    trained = train(config(tmp_path, text, dtype="bfloat16", steps=12, data=2))
    assert losses(trained)[-1] < losses(trained)[0] - 1
    model, _ = load_run(tmp_path)
    assert {x.dtype for x in jax.tree.leaves(model_state(model))} == {
        jnp.dtype(jnp.float32)
    }


def test_what_a_resumed_run_must_keep(stopped, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("another text altogether " * 20)
    for changes, words in [
        (dict(d_model=16), "a resumed run must keep d_model = 32, got 16"),
        (dict(seed=1), "a resumed run must keep seed = 0, got 1"),
        (dict(batch=16), "a resumed run must keep batch = 8, got 16"),
        (dict(text=str(other)), "a resumed run must keep its text, got another"),
    ]:
        with pytest.raises(ValueError, match=words):
            train(config(stopped, text, **changes), resume=True)


def test_a_finished_run_is_never_written_over(straight, text):
    before = finished(straight.config.out)
    with pytest.raises(ValueError, match="has a checkpoint of step 60: resume it"):
        train(straight.config)
    again = train(straight.config, resume=True)
    assert again.began == 60 and len(again.records) == 60
    assert finished(straight.config.out) == before


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(text, tmp_path):
    with pytest.raises(ValueError, match=r"step \d: the (loss|norm) is .*resume from"):
        train(config(tmp_path, text, learning_rate=1e38, warmup=0, save_every=1))
    left = finished(tmp_path)[-1]
    assert left < 9
    load_run(tmp_path, left)


def test_one_run_writes_at_a_time(stopped, text):
    store = Store(Path(stopped) / "checkpoints", writing=True)
    with pytest.raises(ValueError, match="another run writes here"):
        train(config(stopped, text), resume=True)
    store.close()


def test_a_step_that_is_not_there_is_refused(straight):
    with pytest.raises(ValueError, match=r"expected a checkpoint of \[50, 60\], got 7"):
        load_run(straight.config.out, step=7)
    with pytest.raises(ValueError, match="expected a finished checkpoint"):
        load_run(Path(straight.config.out) / "nowhere")


def test_a_sample_is_longer_than_the_window_and_repeats(straight):
    model, c = load_run(straight.config.out)
    said = sample(model, "the cat", tokens=3 * c.seq, seed=1)
    assert len(said) >= 3 * c.seq
    assert said == sample(model, "the cat", tokens=3 * c.seq, seed=1)
    for prompt in ("", "x" * c.seq):
        with pytest.raises(ValueError, match="prompt must have 1 to 15 bytes"):
            sample(model, prompt, tokens=1)


def test_the_command_trains_resumes_and_speaks(text, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "small.yaml"
    sizes = TINY | dict(steps=8, save_every=4, sample_tokens=5)
    file.write_text("".join(f"{k}: {v}\n" for k, v in sizes.items()))
    given = ["train", str(text), "--config", str(file), "--out", str(folder)]
    result = CliRunner().invoke(app, [*given, "--data", "2", "--steps", "6"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the") and "step 6/6: loss" in result.stderr
    assert "6 steps of 128 tokens; data 2" in result.stderr
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "log.jsonl",
        "loss.png",
    ]
    again = CliRunner().invoke(app, [*given, "--resume"])
    assert again.exit_code == 0, again.output
    assert "from step 6" in again.stderr and "step 8: loss" in again.stderr
    moved = folder.rename(tmp_path / "moved")
    bare = ["train", "--resume", "--out", str(moved), "--sample-tokens", "3"]
    settled = CliRunner().invoke(app, bare)
    assert settled.exit_code == 0 and "step 8: loss" in settled.stderr
    assert dataclasses.replace(load_run(moved)[1], data=1).steps == 8


def test_a_resumed_run_still_gets_its_devices(text, tmp_path):
    """Its settings are read before jax starts, which then makes 8 devices of a CPU."""
    train(config(tmp_path, text, steps=2, warmup=1, layers=1, **MESH))
    code = f"""
import jax
from neuronjax.tools.devices import start_devices
from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.run import saved_config
config = TrainConfig(**saved_config({str(tmp_path)!r}))
start_devices(config.devices, "devices")
print(len(jax.devices()))
"""
    few = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}
    env = {k: v for k, v in os.environ.items() if k not in few}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert told.stdout.strip() == "8", told.stderr


def test_the_demo_shows_before_after_curve_and_macros(monkeypatch, tmp_path):
    small = dict(d_model=32, d_ff=32, layers=1, sample_tokens=8)
    full = demo_commands.demo_config
    assert full("x", 200).devices == 8
    monkeypatch.setattr(
        demo_commands,
        "demo_config",
        lambda out, steps: dataclasses.replace(full(out, steps), **small),
    )
    given = ["demo", "--steps", "2", "--out", str(tmp_path / "demo")]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "data 4, tensor 2" in result.stderr
    for words in ("Before", "After", "Shall I compare thee", "LinearCrossEntropyBwd"):
        assert words in result.stdout
    assert "┤█" in result.stdout and (tmp_path / "demo" / "loss.png").exists()
