"""What `neuronjax verify` prints, and what it refuses."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

import neuronjax
from neuronjax.tools.cli import app
from neuronjax.tools.verify.functions import FUNCTIONS, labels_of


def printed(report, *, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


def test_the_report_is_a_table():
    report = neuronjax.verify("RouterTopK")
    text = printed(report, width=160)
    for word in ("RouterTopK", "affinities", "index", "ulps", "partition", "at most"):
        assert word in text


def test_no_number_of_a_report_is_cut_in_a_narrow_terminal():
    report = neuronjax.verify("QKVBwd")  # more outputs than stand side by side
    text = printed(report, width=80)
    assert "…" not in text and text.count("partition, chunk") > 1
    for output in report.outputs:
        assert output.worst is None or f"{output.worst.absolute:.3g}" in text


def test_the_command_verifies_a_name_and_a_function(monkeypatch):
    for op in ("CumSum", "cumsum"):
        result = CliRunner().invoke(app, ["verify", op, "--seed", "2", "--size", "3"])
        assert result.exit_code == 0, result.output
        assert "CumSum against CumSum's plain equations" in result.stdout
    family = neuronjax.primitives.registry.family_of("CumSum")
    right = family.plain
    monkeypatch.setattr(
        family, "plain", lambda *a, **k: tuple(x + 1 for x in right(*a, **k))
    )
    result = CliRunner().invoke(app, ["verify", "CumSum", "--dtype", "bfloat16"])
    assert result.exit_code == 1 and "NO" in result.stdout


@pytest.mark.parametrize(("op", "near"), [("qvk", "qkv"), ("RMSNorm", "rms_norm")])
def test_the_command_refuses_an_unknown_op_in_one_line(op, near):
    result = CliRunner().invoke(app, ["verify", op])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"near matches: {near}" in result.stderr


def test_every_function_of_the_command_is_public_and_its_names_are_in_the_catalog():
    for function, names in FUNCTIONS.items():
        assert set(names) <= set(neuronjax.primitives.registry.CATALOG)
        if function in vars(neuronjax):
            assert labels_of(function)
