"""Every case of every family under the cases folder, against reference outputs."""

import importlib
import json
import os
import pathlib
import pkgutil

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names the narrow dtypes
import numpy as np
import pytest

import tests.adapters
from tests.adapters import ADAPTERS, COMPARISONS, within
from tests.not_built import TABLE, given

for _module in pkgutil.iter_modules(tests.adapters.__path__):
    importlib.import_module(f"tests.adapters.{_module.name}")

FOLDER = pathlib.Path(
    os.environ.get("NEURONJAX_CASES", pathlib.Path(__file__).parent / "cases")
)


def _cases():
    for index in sorted(FOLDER.glob("*/index.json")):
        content = json.loads(index.read_text())
        for case in content.get("cases", []):
            yield pytest.param(
                index.parent, case, id=f"{index.parent.name}/{case['name']}"
            )


def _arrays(folder, case, which):
    with np.load(folder / case.get("file", f"{case['name']}.npz")) as stored:
        return {
            name: jax.device_put(stored[entry["array"]])
            for name, entry in given(case[which]).items()
        }


def _outputs(case, inputs, call):
    """The adapter's outputs, and the gradients that the case asks for."""
    if case["cotangent"] is None:  # an output of that name may be a function's own
        return call(inputs)
    wrt = [name[5:] for name in case["outputs"] if name.startswith("grad_")]

    def of_wrt(live):
        return call({**inputs, **live})

    outs, pull = jax.vjp(of_wrt, {name: inputs[name] for name in wrt})
    seeds = jax.tree.map(jnp.zeros_like, outs)
    # The case names its outputs in order; those of a pytree are sorted.
    seeds[next(iter(case["outputs"]))] = case["cotangent"]
    (grads,) = pull(seeds)
    return {**outs, **{f"grad_{name}": grads[name] for name in wrt}}


def _elementwise(name, got, wanted, case):
    within(name, got[name], wanted[name], case)


@pytest.mark.parametrize(("folder", "case"), list(_cases()))
def test_case(folder, case):
    reason = next((row.reason for row in TABLE if row.covers(case)), None)
    if reason is not None:
        pytest.skip(reason=reason)
    assert case["function"] in ADAPTERS, f"unknown function {case['function']}"
    inputs = _arrays(folder, case, "inputs")
    name = next((name for name in inputs if name.startswith("cotangent_")), None)
    case = dict(case, cotangent=inputs.pop(name, None))
    options = given(case["options"])
    got = _outputs(case, inputs, lambda live: ADAPTERS[case["function"]](live, options))
    wanted = _arrays(folder, case, "outputs")
    compare = COMPARISONS.get(case["function"], _elementwise)
    for name in wanted:
        compare(name, got, wanted, case)


def test_no_row_of_the_not_built_table_is_idle():
    """A row that covers nothing is stale, unless the folder is another one."""
    cases = [param.values[1] for param in _cases()]
    if "NEURONJAX_CASES" not in os.environ:
        assert [row for row in TABLE if not any(map(row.covers, cases))] == []
