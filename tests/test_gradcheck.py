"""`neuronjax.gradcheck`: a wrong derivative is found, whichever it is."""

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import neuronjax
from neuronjax.primitives import registry
from neuronjax.tools.cli import app
from neuronjax.tools.gradcheck import gradcheck
from neuronjax.tools.verify.functions import every_label


def test_right_derivatives_pass():
    done = []
    report = gradcheck("RoPE", "CumSum", "CumSumBwd", done=done.append)
    assert report and tuple(done) == report.rows
    assert [row.name for row in done] == ["RoPE", "CumSum", "CumSumBwd"]
    for row in report.rows:
        assert len(row.errors) == 3 and max(row.errors) < 1e-8
        assert row.against == "differences"
    assert "3 of 3 macros pass" in str(report)


def test_a_wrong_backward_is_found_with_its_operand(monkeypatch):
    """The gradient of the sine table with its sign turned: reverse mode alone errs."""
    family = registry.family_of("RoPE")
    right = family.backward

    def wrong(*args, **kwargs):
        dx, dcos, dsin = right(*args, **kwargs)
        return dx, dcos, -dsin

    monkeypatch.setattr(family, "backward", wrong)
    report = gradcheck("RoPE")
    (row,) = report.failed
    assert not report and not row
    assert row.forward < 1e-8 and row.reverse > 1 and row.operand == 2
    assert "FAIL" in str(report)


def test_a_wrong_second_derivative_is_found(monkeypatch):
    """A backward that holds its saved operand constant: first order is right."""
    import jax

    family = registry.family_of("NeuronReduceMacro")
    right = family.backward

    def wrong(operands, outs, cotangents, **config):
        held = jax.lax.stop_gradient(operands)
        return right(held, outs, cotangents, **config)

    monkeypatch.setattr(family, "backward", wrong)
    (row,) = gradcheck("NeuronReduceMacro").failed
    assert row.forward < 1e-8 and row.reverse < 1e-8 and row.second > 1e-3


@pytest.mark.parametrize("factor", [2, 3])
def test_a_users_kernel_is_checked_like_others(factor):
    """The derivative of x**2 is 2 x."""

    def gradient(operands, outs, cotangents):
        return (factor * operands[0] * cotangents,)

    neuronjax.register_kernel(
        "CheckedSquare",
        lambda x: x * x,
        backward=gradient,
        example=lambda dtype, batch: (jnp.arange(1, batch + 1).astype(dtype),),
    )
    report = gradcheck("CheckedSquare")
    assert bool(report) == (factor == 2)


def test_a_kernel_that_raises_fails_and_the_others_are_checked():
    """Its example has a cell that no reshape can give."""
    neuronjax.register_kernel(
        "CheckedBroken",
        lambda x: x.reshape(3, 7),
        example=lambda dtype, batch: (jnp.ones(batch, dtype),),
    )
    broken, right = gradcheck("CheckedBroken", "CumSum").rows
    assert right and not broken and "reshape" in str(broken.raised)
    assert "FAIL" in broken.line and "reshape" in broken.line


def test_by_default_users_kernels_with_an_example_are_checked_too():
    def numbers(dtype, batch):
        return (np.arange(1, batch + 1).astype(dtype),)

    neuronjax.register_kernel("CheckedByDefault", lambda x: x * x, example=numbers)
    neuronjax.register_kernel("CheckedByNobody", lambda x: x * x)
    labels = every_label()
    assert set(registry.examples()) < set(labels) and "CheckedByDefault" in labels
    assert "CheckedByNobody" not in labels
    assert gradcheck("CheckedByDefault")
    (row,) = gradcheck("CheckedByNobody").rows
    assert not row and "no example" in str(row.raised)


def test_what_rounds_is_compared_with_its_plain_form():
    (row,) = gradcheck("OutputProjection (static fp8)").rows
    assert row and row.against == "plain form" and len(row.errors) == 3


def test_what_has_no_derivative_says_why():
    (row,) = gradcheck("RMSNormQuant").rows
    assert row and not row.errors and "no derivative" in row.against


def test_cores_that_cooperate_are_checked():
    assert gradcheck("SB2SBAllGather")


def test_an_unknown_name_is_refused_before_anything_runs():
    done = []
    with pytest.raises(ValueError, match="near matches: CumSum"):
        gradcheck("RoPE", "CumSums", done=done.append)
    assert not done


def test_the_command_has_a_table_and_an_exit_status(monkeypatch):
    result = CliRunner().invoke(app, ["gradcheck", "CumSum"])
    assert result.exit_code == 0 and "1 of 1 macros pass" in result.stdout
    family = registry.family_of("CumSum")
    right = family.backward

    def wrong(*args, **kwargs):
        return tuple(2 * grad for grad in right(*args, **kwargs))

    monkeypatch.setattr(family, "backward", wrong)
    result = CliRunner().invoke(app, ["gradcheck", "cumsum"])
    assert result.exit_code == 1 and "FAIL" in result.stdout


def test_the_command_checks_a_users_file(tmp_path):
    file = tmp_path / "gradchecked_kernel.py"
    file.write_text(
        "import jax.numpy as jnp, neuronjax\n"
        "neuronjax.register_kernel('CheckedFile', lambda x: x * x,\n"
        "    backward=lambda operands, outs, d: (operands[0] * d,),\n"
        "    example=lambda dtype, batch: (jnp.ones(batch, dtype),))\n"
    )
    for arguments in (
        ["gradcheck", "CheckedFile", "CumSum"],
        ["verify", "CheckedFile"],
    ):
        result = CliRunner().invoke(app, [*arguments, "--from", str(file)])
        assert result.exit_code == (arguments[0] == "gradcheck"), result.output
    lines = CliRunner().invoke(app, ["gradcheck", "CheckedFile", "CumSum"]).stdout
    head, first, second, last = lines.splitlines()
    assert "FAIL" in first and "CheckedFile" in first and "pass" in second
    assert "second" in head and last.startswith("1 of 2 macros pass")


def test_the_command_refuses_an_unknown_name_in_one_line():
    result = CliRunner().invoke(app, ["gradcheck", "rms_nrom"])
    assert result.exit_code == 2 and "near matches: rms_norm" in result.stderr


def test_it_is_a_function_of_the_package():
    assert neuronjax.gradcheck is gradcheck
