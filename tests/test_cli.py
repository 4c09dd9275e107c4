"""The command streams what the model says, and a mistake is one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import neuronjax
from neuronjax.models.pretrained import load_pretrained
from neuronjax.tools.cli import app
from tests.tiny_checkpoints import CONFIG, random_tensors, write_folder, write_gguf

CASES = Path(os.environ.get("NEURONJAX_CASES", Path(__file__).parent / "cases"))


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("tiny") / "model", random_tensors())


@pytest.fixture(scope="module")
def loaded(folder):
    return load_pretrained(folder)


def answer(loaded, ids, **options):
    new = loaded.model.generate([ids], **{"max_tokens": 8} | options)[0]
    return loaded.tokenizer.decode(new, skip_special_tokens=True)


def test_the_answer_goes_to_stdout_and_the_pace_to_stderr(folder, loaded):
    result = invoke("run", folder, "the cat", "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    assert result.stdout == answer(loaded, loaded.tokenizer.encode("the cat")) + "\n"
    assert re.search(
        r"prompt 5 tokens, answer 8 tokens, [\d.]+ tokens/s", result.stderr
    )


def test_a_gguf_file_says_the_same(tmp_path, folder):
    file = write_gguf(tmp_path / "model.gguf", random_tensors())
    texts = {
        invoke("run", path, "the cat", "--max-tokens", 8).stdout
        for path in (folder, file)
    }
    assert len(texts) == 1


def test_chat_asks_by_the_template(folder, loaded):
    result = invoke("run", folder, "the", "--chat", "--max-tokens", 8)
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": "the"}])
    assert result.stdout == answer(loaded, ids) + "\n"


def test_a_seed_repeats_its_draws(folder, loaded):
    options = ("--max-tokens", 8, "--temperature", 2, "--top-p", 0.9, "--seed")
    first, again, other = (
        invoke("run", folder, "the", *options, seed).stdout for seed in (1, 1, 2)
    )
    ids = loaded.tokenizer.encode("the")
    expected = answer(loaded, ids, temperature=2.0, top_p=0.9, seed=1)
    assert first == again == expected + "\n"
    assert first != other


def test_a_model_runs_in_bfloat16(folder):
    result = invoke("run", folder, "the", "--max-tokens", 3, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_several_devices_say_the_same(folder, loaded, devices):
    result = invoke("run", folder, "the cat", "--max-tokens", 8, "--devices", devices)
    assert result.exit_code == 0, result.output
    assert result.stdout == answer(loaded, loaded.tokenizer.encode("the cat")) + "\n"


@pytest.mark.parametrize(
    "mesh", [("--tensor", 2), ("--lnc", 2), ("--tensor", 2, "--lnc", 2)]
)
def test_ranks_and_cores_say_the_same(folder, loaded, mesh):
    result = invoke("run", folder, "the cat", "--max-tokens", 8, *mesh)
    assert result.exit_code == 0, result.output
    assert result.stdout == answer(loaded, loaded.tokenizer.encode("the cat")) + "\n"
    assert "answer 8 tokens" in result.stderr and "tokens/s" in result.stderr


@pytest.mark.parametrize(
    "options", [("--devices", "2"), ("--tensor", "2", "--lnc", "2")]
)
def test_devices_are_made_before_jax_starts(folder, loaded, options):
    code = "from neuronjax.tools.cli import app; app()"
    command = [sys.executable, "-c", code, "run", str(folder), "the cat"]
    command += ["--max-tokens", "8", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == answer(loaded, loaded.tokenizer.encode("the cat")) + "\n"


def test_one_token_still_has_a_pace(folder):
    result = invoke("run", folder, "the", "--max-tokens", 1)
    assert "answer 1 tokens" in result.stderr and "tokens/s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nothing", "x"), "nothing: expected smollm2, a .gguf file"),
        (("run", "{folder}", ""), "prompts[0] must hold ids"),
        (("run", "{folder}", "x", "--max-tokens", 128), "max_seq = 128, got 1 + 128"),
        (("run", "{folder}", "x", "--top-p", 2), "top_p must be in (0, 1]"),
        (("run", "{folder}", "x", "--devices", 99), "--devices: expected at most 8"),
        (("run", "{folder}", "x", "--devices", 99999), "expected at most 1024 devices"),
        (
            ("run", "{folder}", "x", "--tensor", 4),
            "the 4 ranks of 'tensor' must divide the key heads, got num_kv_heads = 2",
        ),
        (("run", "{folder}", "x", "--tensor", 5, "--lnc", 2), "at most 8"),
        (("run", "{folder}", "x", "--tensor", 2, "--devices", 2), "without --devices"),
        (("run", "{folder}", "x", "--lnc", 2, "--quant", "mxfp8"), "without --devices"),
        (("run", "{folder}/config.json", "x"), "expected a .gguf file or a folder"),
        (("trace", "nothing"), "nothing: expected smollm2, a .gguf file"),
        (("trace", "smolm2"), "nothing is at that path; did you mean smollm2?"),
        (("trace", "{folder}/config.json"), "expected .gguf or a folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, arguments, words):
    arguments = [str(a).replace("{folder}", str(folder)) for a in arguments]
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("neuronjax: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tran",), "neuronjax: no such command 'tran'. Did you mean 'train'"),
        (("draw", "atention"), "neuronjax draw: no such command 'atention'. Did you"),
        (("trace", "x", "--sqe", 3), "neuronjax trace: no such option: --sqe"),
        (("verify",), "neuronjax verify: missing argument 'op' (neuronjax verify"),
        (("demo", "--steps", 0), "neuronjax demo: invalid value for '--steps'"),
        (("demo", "more"), "neuronjax demo: got unexpected extra argument"),
        (("--verbose",), "neuronjax: no such option: --verbose"),
        (("gradcheck", "MPL"), "neuronjax: gradcheck: NAMES must be a macro NAME"),
        (("table", "MPL"), "neuronjax: table: name must be a macro NAME"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith(words)
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_ranks_are_refused_before_weights_are_read(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    result = invoke("run", tmp_path, "x", "--tensor", 4)
    assert result.exit_code == 2 and "must divide the key heads" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--dtype", "int8"),
        ("--max-tokens", 0),
        ("--temperature", -1),
        ("--devices", 0),
        ("--tensor", 0),
        ("--lnc", 3),
    ],
)
def test_an_option_outside_its_range_is_refused(folder, option, value):
    result = invoke("run", folder, "x", option, value)
    assert result.exit_code == 2 and option in result.stderr


def test_a_corrupt_checkpoint_is_one_line(tmp_path):
    folder = write_folder(tmp_path, random_tensors())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    result = invoke("run", folder, "x")
    assert result.exit_code == 2
    assert "model.safetensors: tensor" in result.stderr
    assert "truncated" in result.stderr and result.stderr.count("\n") == 1


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    config = {"vocab_size": CONFIG.vocab_size - 1}
    tensors = random_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:-1]
    result = invoke("run", write_folder(tmp_path, tensors, **config), "x")
    assert result.exit_code == 2
    assert "vocab_size = 261" in result.stderr and "got 262" in result.stderr


def test_a_model_without_a_chat_template_says_so(tmp_path):
    folder = write_folder(tmp_path, random_tensors())
    (folder / "tokenizer_config.json").unlink()
    result = invoke("run", folder, "x", "--chat")
    assert result.exit_code == 2 and "no chat template" in result.stderr


def test_trace_lists_the_macros_of_both_phases(folder):
    result = invoke("trace", folder, "--seq", 16)
    assert result.exit_code == 0, result.output
    assert "prefill, batch 1, 16 tokens" in result.stdout
    assert "one decode step after 16 tokens" in result.stdout
    for name in (
        "QKV",
        "CausalAttention",
        "AttentionTkgFwd",
        "OutputProjection",
        "MLP",
    ):
        assert name in result.stdout


def test_trace_needs_no_weights(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    result = invoke("trace", tmp_path, "--gradient", "--seq", 16)
    assert result.exit_code == 0, result.output
    assert "BackwardsAttention" in result.stdout


@pytest.mark.parametrize("quant", ["row-fp8", "static-fp8", "mxfp8", "mxfp4"])
def test_a_quantized_model_speaks(folder, quant):
    result = invoke("run", folder, "the cat", "--max-tokens", 4, "--quant", quant)
    assert result.exit_code == 0, result.output
    assert "answer 4 tokens" in result.stderr


def test_eval_reports_each_form_beside_float32(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 8)
    arguments = "--quant", "row-fp8", "--window", 16, "--tokens", 40
    result = invoke("eval", folder, text, *arguments)
    assert result.exit_code == 0, result.output
    assert "Perplexity of 39 tokens in windows of 16" in result.stdout
    rows = re.findall(r"│ ([\w-]+) +│ +([\d.]+) │ +([\d.]+) │", result.stdout)
    assert [name for name, *_ in rows] == ["float32", "row-fp8"]
    assert float(rows[1][1]) == pytest.approx(float(rows[0][1]), rel=0.2)


def test_eval_refuses_an_unknown_form(folder):
    result = invoke("eval", folder, "--quant", "int3")
    assert result.exit_code == 2
    assert "expected names from float32, bfloat16, row-fp8" in result.stderr


def test_eval_names_a_file_that_is_no_text(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"\xff\xfe")
    result = invoke("eval", folder, text)
    assert result.exit_code == 2
    assert "text.txt: expected UTF-8 text" in result.stderr.replace("\n", "")


def test_help_names_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    panels = re.split("╭─ ([A-Z].*?) ─", result.stdout)
    commands = {
        title: re.findall(r"^│ ([a-z]\w+) ", text, re.M)
        for title, text in zip(panels[1::2], panels[2::2], strict=True)
    }
    assert commands == {
        "Options": [],
        "Train and run": ["demo", "train", "run", "eval"],
        "Look": ["trace", "diff", "export", "draw"],
        "Check": ["verify", "gradcheck", "table"],
    }


def test_no_command_is_the_help():
    assert invoke().stdout.strip() == invoke("--help").stdout.strip() != ""


def test_the_version_names_jax_too():
    versions = f"neuronjax {neuronjax.__version__}, jax {jax.__version__}, Python 3."
    assert invoke("--version").stdout.startswith(versions)


def test_smollm2_says_what_the_reference_says(smollm2_path):
    case = json.loads((CASES / "smollm2" / "index.json").read_text())["plain0"]
    expected = case["text"].split("<|im_end|>")[0]
    result = invoke("run", smollm2_path, case["prompt"], "--max-tokens", 32)
    assert result.stdout == expected + "\n"
    assert expected.startswith(" Paris")
