"""Kernels of users: what is refused, and what the table finds wrong."""

import jax
import jax.numpy as jnp
import pytest

import neuronjax
from neuronjax.primitives import registry
from neuronjax.tools.transformations import State
from tests.user_kernel_case import GATE, X, register


def test_a_kernel_without_derivative_refuses_in_its_words():
    emit = neuronjax.register_kernel(
        "Ranked",
        lambda x: jnp.argsort(x, axis=-1).astype(x.dtype),
        no_derivative="ranks are steps",
        example=lambda dtype, batch: jax.random.normal(
            jax.random.key(0), (batch, 4), dtype
        ),
    )
    with pytest.raises(NotImplementedError, match="Ranked: ranks are steps"):
        jax.grad(lambda x: emit(x).sum())(X)
    report = neuronjax.check_transformations("Ranked", ["jit", "grad", "remat"])
    assert [c.state for c in report.cells] == [
        State.GREEN,
        State.REFUSED,
        State.REFUSED,
    ]
    assert report["grad"].detail == "ranks are steps"


def test_a_declared_refusal_that_does_not_refuse_is_red():
    register("Shy", refuses={"grad": "it says so"})
    report = neuronjax.check_transformations("Shy", ["grad", "jit"])
    assert not report and report["grad"].state is State.RED
    assert "expected a refusal" in report["grad"].detail
    assert report["jit"].state is State.GREEN


@pytest.mark.parametrize(
    ("transformation", "backward"),
    [
        ("grad", lambda ops, y, dy, *, limit: (2 * dy, 0 * dy, None)),
        ("bfloat16", lambda ops, y, dy, *, limit: (dy, dy, None)),
    ],
)
def test_a_wrong_backward_is_red(transformation, backward):
    register("Wrong", backward=backward)
    report = neuronjax.check_transformations("Wrong", ["jit", transformation])
    assert report["jit"].state is State.GREEN
    assert report[transformation].state is State.RED
    assert isinstance(report[transformation].error, AssertionError)


def test_a_wrong_kernel_is_red_against_its_plain_reference():
    register("Off", plain=lambda x, gate, index=None, *, limit=2.0: x * gate)
    report = neuronjax.check_transformations("Off", ["jit", "donation"])
    assert not report
    assert "of the plain reference" in report["jit"].detail
    assert str(report).startswith("Off: 2 red")


def _gradient(backward):
    emit = register("Faulty", backward=backward)
    return jax.make_jaxpr(jax.grad(lambda x: emit(x, GATE, jnp.arange(3)).sum()))(X)


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        (lambda dy: dy, "FaultyBwd: backward must return a tuple of 3 gradients"),
        (
            lambda dy: (dy, dy),
            "tuple of 3 gradients, one for each operand, got a tuple",
        ),
        (
            lambda dy: (dy[0], dy, None),
            r"gradient of x must be .* \(4, 3\), got float32",
        ),
        (lambda dy: (dy, None, None), "gradient of gate must be an array of shape"),
        (lambda dy: (dy, dy.astype(int), None), "gate must be a float array"),
        (lambda dy: (dy, dy, jnp.zeros(3)), "index is int32 and has no gradient"),
        (lambda dy: ({"x": dy}, dy, None), "FaultyBwd: "),
    ],
)
def test_gradients_of_another_structure_or_shape_are_refused(gradients, words):
    with pytest.raises(ValueError, match=words):
        _gradient(lambda operands, y, dy, *, limit: gradients(dy))


@pytest.mark.parametrize(
    ("function", "outputs", "words"),
    [
        (
            lambda x: (x, x),
            None,
            "must return one array, got a tuple of 2; name several",
        ),
        (lambda x: x, ("a", "b"), r"must return a tuple of a, b, got float32\[4, 3\]"),
        (lambda x: (x,), ("a", "b"), "must return a tuple of a, b, got a tuple of 1"),
        (lambda x: "x", None, "must return one array, got str"),
    ],
)
def test_outputs_of_another_structure_are_refused(function, outputs, words):
    emit = neuronjax.register_kernel("Faulty", function, outputs=outputs)
    with pytest.raises(ValueError, match=f"Faulty: the function {words}"):
        jax.make_jaxpr(emit)(X)


def test_operands_that_are_no_arrays_are_refused_by_name():
    unit = register()
    with pytest.raises(ValueError, match="GatedUnit: operand gate must be an array"):
        unit(X, "gate")
    with pytest.raises(ValueError, match="limit must be a hashable Python value"):
        unit(X, GATE, limit=jnp.ones(2))


def test_the_backward_of_a_kernel_is_no_free_name():
    register()
    with pytest.raises(ValueError, match="GatedUnitBwd is the backward of GatedUnit"):
        neuronjax.register_kernel("GatedUnitBwd", lambda x: x)
    neuronjax.register_kernel("LoneBwd", lambda x: x)
    with pytest.raises(ValueError, match="LoneBwd is another kernel"):
        register("Lone")
    register("Lone", backward=None)
    register("Lone", backward=None)
    assert registry.resolve_kernel_config("LoneBwd").emitter == "<lambda>"


def test_a_user_kernel_is_no_part_of_the_catalog():
    register()
    assert "GatedUnit" not in registry.CATALOG
    assert not any("GatedUnit" in label for label in registry.examples())


def test_a_kernel_without_an_example_says_what_it_needs():
    neuronjax.register_kernel("Bare", lambda x: x)
    with pytest.raises(ValueError, match="Bare: it has no example"):
        neuronjax.check_transformations("Bare")


def test_an_example_may_say_how_a_mesh_splits_it():
    def both(dtype, batch):
        x = jax.random.normal(jax.random.key(0), (batch, batch), dtype)
        return x, x, None

    register("Square", example=both)
    with pytest.raises(ValueError, match="axes .* of array 0 .* all follow batch"):
        neuronjax.check_transformations("Square", ["jit"])

    def told(dtype, batch):
        return neuronjax.Example(both(dtype, batch), {}, (1, 1), (1,))

    register("Square", example=told)
    assert neuronjax.check_transformations("Square", ["shard_map over 2", "jit"])


def test_unknown_names_and_transformations_are_refused():
    with pytest.raises(ValueError, match="got 'RoPee'; near matches: RoPE"):
        neuronjax.check_transformations("RoPee")
    with pytest.raises(ValueError, match="transformations must be of jit, .* 'vmapp'"):
        neuronjax.check_transformations("RoPE", ["vmapp"])


def test_cells_that_lack_devices_are_told(monkeypatch):
    register()
    monkeypatch.setattr(jax, "devices", lambda: [None])
    names = ["shard_map over 2", "explicit sharding"]
    report = neuronjax.check_transformations("GatedUnit", names)
    assert [cell.state for cell in report.cells] == [State.NOT_RUN] * 2
    assert report["shard_map over 2"].detail.startswith("needs 2 devices, there are 1")


def test_the_report_is_a_table():
    import io

    from rich.console import Console

    register("Shy", refuses={"grad": "it [says] so"})
    seen = []
    report = neuronjax.check_transformations(
        "Shy", ["jit", "grad"], progress=seen.append
    )
    assert tuple(seen) == report.cells
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "Shy: 1 green, 1 red" in text and "Red: expected a refusal" in text
