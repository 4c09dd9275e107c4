"""The settings of a training run: every wrong one is a single clear error."""

import dataclasses
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neuronjax.tools.cli import app
from neuronjax.tools.train.config import TrainConfig, read_config
from neuronjax.tools.train.flags import settings_rows

ROOT = Path(__file__).resolve().parent.parent

MISTAKES = [
    (dict(seq=1), "seq must be at least 2, got 1"),
    (dict(steps=0), "steps must be at least 1, got 0"),
    (dict(steps=2.5), "steps must be an integer, got 2.5"),
    (dict(steps=True), "steps must be an integer, got True"),
    (dict(steps=None), "steps must be an integer, got None"),
    (dict(text=3), "text must be text, got 3"),
    (dict(learning_rate="fast"), "learning_rate must be a number, got 'fast'"),
    (dict(learning_rate=float("nan")), "learning_rate must be finite, got nan"),
    (dict(learning_rate=-1), "learning_rate must be at least 0.0, got -1.0"),
    (dict(validation=1.0), "validation must be at most 0.9, got 1.0"),
    (dict(dtype="int8"), "dtype must be float32 or bfloat16, got int8"),
    (dict(lnc=3), "lnc must be 1 or 2, got 3"),
    (dict(heads=3), "heads must divide d_model = 128, got 3"),
    (dict(heads=128, kv_heads=1), "heads must leave each head an even width"),
    (dict(kv_heads=3), "kv_heads must divide heads = 4, got 3"),
    (dict(experts=1), "experts_per_token must be at most experts = 1, got 2"),
    (dict(warmup=300), "warmup must be less than steps = 300, got 300"),
    (dict(batch=6, data=4), "batch must be a multiple of data * expert = 4, got 6"),
    (
        dict(batch=6, data=2, expert=2, experts=4),
        "batch must be a multiple of data * expert = 4, got 6",
    ),
    (dict(tensor=4), "tensor must divide kv_heads = 2, got 4"),
    (
        dict(d_model=96, d_ff=192, heads=3, kv_heads=3, tensor=3),
        "tensor must divide the 256 tokens, got 3",
    ),
    (dict(d_ff=6, lnc=2, tensor=2), "d_ff must be a multiple of tensor * lnc = 4"),
    (dict(shared_d_ff=3, lnc=2), "shared_d_ff must be a multiple of tensor * lnc = 2"),
    (dict(expert=2), "expert must divide experts = 0, got 2"),
    (dict(experts=3, expert=2), "expert must divide experts = 3, got 2"),
    (dict(prompt=""), "prompt must not be empty"),
    (dict(prompt="a" * 128), "prompt must have fewer tokens than seq = 128, got 128"),
    (dict(prompt="é" * 64), "prompt must have fewer tokens than seq = 128, got 128"),
]


@pytest.mark.parametrize(("wrong", "words"), MISTAKES)
def test_a_wrong_setting_is_refused(wrong, words):
    with pytest.raises(ValueError) as error:
        TrainConfig(**wrong)
    assert str(error.value).startswith("TrainConfig: ") and words in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_of_yaml_are_numbers(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("learning_rate: 1e-3\nclip: 1\nd_model: 64\ntext: null\n")
    config = TrainConfig(**read_config(file))
    assert (config.learning_rate, config.clip, config.d_model) == (1e-3, 1.0, 64)
    assert isinstance(config.clip, float) and config.text is None


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("d_modle: 64", "d_modle is no setting, did you mean d_model?"),
        ("xyzzy: 64", "xyzzy is no setting"),
        ("- d_model", "expected lines of 'name: value', got list"),
        ("d_model: [", "expected yaml, got"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, yaml, words):
    file = tmp_path / "small.yaml"
    file.write_text(yaml)
    with pytest.raises(ValueError, match="small.yaml: ") as error:
        read_config(file)
    assert words in str(error.value)


def test_an_empty_file_leaves_the_defaults(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("# nothing yet\n")
    assert TrainConfig(**read_config(file)) == TrainConfig()


def test_every_setting_is_a_flag_and_in_the_docs():
    help_text = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    page = (ROOT / "docs" / "training.md").read_text()
    assert "\n".join(settings_rows()) in page
    for field in dataclasses.fields(TrainConfig):
        if field.name != "text":
            assert f"--{field.name.replace('_', '-')} " in help_text.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--heads", "3"), "TrainConfig: heads must divide d_model = 128, got 3"),
        (
            ("--resume", "--out", "{folder}"),
            "expected a finished checkpoint, found none",
        ),
        (("nothing.txt", "--out", "{folder}"), "nothing.txt: No such file"),
        (("--config", "nothing.yaml"), "nothing.yaml: No such file"),
        (("{short}", "--out", "{folder}"), "at least 2 * seq = 256 bytes to learn"),
        (("--data", "16", "--out", "{folder}"), "expected at most 8, which are all"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    places = {"{folder}": str(tmp_path / "run"), "{short}": str(short)}
    given = [places.get(argument, argument) for argument in arguments]
    result = CliRunner().invoke(app, ["train", *given])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("neuronjax: ") and words in line
    assert not result.stdout


def test_a_flag_of_the_wrong_type_is_refused():
    result = CliRunner().invoke(app, ["train", "--steps", "many"])
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and line.startswith("neuronjax train: invalid value")
    assert "'--steps'" in line and line.endswith("(neuronjax train --help)")


@pytest.mark.parametrize(("steps", "warmup"), [(300, 20), (200, 20), (50, 5), (5, 0)])
def test_a_short_run_warms_up_for_a_tenth(steps, warmup):
    assert TrainConfig(steps=steps).warmup_steps == warmup
    assert TrainConfig(steps=steps, warmup=steps - 1).warmup_steps == steps - 1


def test_the_yaml_of_the_docs_is_a_configuration(tmp_path):
    page = (ROOT / "docs" / "training.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (tmp_path / "small.yaml").write_text(block)
    config = TrainConfig(**read_config(tmp_path / "small.yaml"))
    assert config.devices == 8 and config.experts == 8
