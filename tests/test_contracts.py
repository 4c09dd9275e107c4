"""Refusals, generated from the contracts table."""

import inspect
import pathlib

import jax
import jax.numpy as jnp
import pytest

import neuronjax
from neuronjax.primitives import contracts, registry
from neuronjax.tools import tables

ROWS = [
    (function, row.id)
    for row in contracts.CONTRACTS.values()
    for function in row.functions
]


def _function(name):
    return getattr(neuronjax, name, None) or getattr(neuronjax.emit, name)


@pytest.mark.parametrize(("function", "row"), ROWS, ids=lambda x: str(x))
def test_a_broken_rule_is_reported_and_refused(function, row):
    contract = contracts.CONTRACTS[row]
    arguments = contract.example(function)
    report = neuronjax.can(function, **arguments)
    message = {v.id: v.message for v in report.violations}[row]
    assert "{" not in message
    if contract.tag == "hw" and not _is_tiled(arguments):
        return
    with pytest.raises(ValueError) as refusal:
        _function(function)(**arguments)
    assert message in str(refusal.value).splitlines()
    if not contract.literal:
        assert message.startswith(f"{function}: ")


def _is_tiled(arguments):
    return any(isinstance(x, neuronjax.MemrefTile) for x in arguments.values())


@pytest.mark.parametrize(("function", "row"), ROWS, ids=lambda x: str(x))
def test_a_refusal_comes_at_trace_time(function, row):
    contract = contracts.CONTRACTS[row]
    arguments = contract.example(function)
    if contract.tag == "hw" and not _is_tiled(arguments):
        return
    static = {k: v for k, v in arguments.items() if not _has_arrays(v)}
    arrays = {k: v for k, v in arguments.items() if k not in static}
    with pytest.raises(ValueError):
        jax.eval_shape(lambda kw: _function(function)(**kw, **static), arrays)


def _has_arrays(value):
    return any(isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def test_sizes_suggested_by_an_error_pass():
    """R-26: the nearest size is fed back, and works."""
    x, table = jnp.zeros((60, 1, 2, 8)), jnp.zeros((30, 1, 8))
    nearest = neuronjax.can("RoPE", x, table, table).nearest["d"]
    x, table = jnp.zeros((nearest, 1, 2, 8)), jnp.zeros((nearest // 2, 1, 8))
    assert neuronjax.can("RoPE", x, table, table).on_chip
    assert neuronjax.RoPE(x, table, table).shape == x.shape


def test_every_emitter_that_takes_hints_refuses_other_keywords():
    """A misspelled option would be one that is accepted and ignored: R-27."""
    for name, emitter in vars(neuronjax.emit).items():
        if (
            name.endswith("_kernel")
            and "hints" in inspect.signature(emitter).parameters
        ):
            assert f"{name}.hints" in contracts.CONTRACTS, name


def _switches():
    for function, entry in sorted(contracts.FUNCTIONS.items()):
        for parameter in entry.signature.parameters.values():
            if isinstance(parameter.default, bool):
                yield function, parameter.name


@pytest.mark.parametrize(("function", "switch"), list(_switches()))
def test_a_switch_is_true_or_false(function, switch):
    """R-27, R-44: a word would be taken for True, an array has no truth value."""
    arguments = dict(contracts.rows_of(function)[-1].example(function))
    for value, words in (("no", switch), (jnp.zeros(2), f"{switch} must be a Python")):
        report = neuronjax.can(function, **arguments | {switch: value})
        assert not report
        assert any(words in v.message for v in report.violations), str(report)


@pytest.mark.parametrize("name", sorted(registry.CATALOG))
def test_every_name_resolves_to_a_family_that_has_it(name):
    entry = neuronjax.resolve_kernel_config(name)
    assert entry.name == name and entry.twin in ("bespoke", "generic")
    assert name in registry.resolve_family(name).names
    if entry.emitter:
        assert callable(getattr(neuronjax.emit, entry.emitter))


def test_a_call_that_does_not_fit_names_the_function():
    q = jnp.ones((2, 8, 4))
    with pytest.raises(TypeError, match=r"^attention_cte\(\) .*near.*: causal_mask$"):
        neuronjax.attention_cte(q, q, q, causal=True)
    with pytest.raises(TypeError, match=r"^rms_norm\(\) missing .*'scale'$"):
        neuronjax.can("rms_norm", q)


def test_an_unknown_name_lists_near_matches():
    with pytest.raises(ValueError, match="got 'RoPe'; near matches: RoPE"):
        neuronjax.resolve_kernel_config("RoPe")


def test_aliases_resolve():
    assert neuronjax.resolve_kernel_config("MLPKernel").name == "MLP"
    assert neuronjax.resolve_kernel_config("RMSNormQuantKernel").leaf == "rmsnorm"


def test_an_unknown_function_is_refused_by_can():
    with pytest.raises(ValueError, match="can: op must be one of"):
        neuronjax.can("nonsense")


@pytest.mark.parametrize("page", tables.PAGES)
def test_generated_pages_are_up_to_date(page):
    path = pathlib.Path(__file__).parents[1] / "docs" / page
    assert path.read_text() == tables.PAGES[page](), (
        "run python -m neuronjax.tools.tables"
    )
