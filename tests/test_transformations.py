"""The transformation table: every macro NAME x every transformation.

A macro joins it by registering; a refusal is declared with its family. The cells are
those of `neuronjax.tools.transformations`, which a user runs on a kernel too.
"""

import pytest

from neuronjax.tools import tables
from neuronjax.tools.transformations import CELLS, rules, run_cell
from tests.macro_case import NAMES, MacroCase

# pytest runs all tests of one parameter of a module next to each other: those of a NAME
# share its operands, its reference and the programs of both.
each_name = pytest.mark.parametrize("name", NAMES, scope="module")


def test_the_table_on_the_docs_page_has_these_columns():
    assert tuple(CELLS) == tables.TRANSFORMATIONS


@pytest.mark.parametrize("transformation", CELLS)
@each_name
def test_transformation(name, transformation):
    run_cell(name, transformation)


@each_name
def test_a_foreign_name_is_refused_in_the_contract_words(name):
    case = MacroCase(name)
    expected = " or ".join(case.family.guard)
    message = case.family.foreign.format(expected=expected, name="Nonsense")
    with pytest.raises(ValueError, match=message):
        case.family(*case.flat, name="Nonsense")
    with pytest.raises(ValueError, match=message):
        case.family.macro_p.bind(
            *case.flat, name="Nonsense", config=(), tree=case.tree, axes=()
        )


@each_name
def test_integer_operands_get_float0_tangents(name):
    """R-45."""
    rules.integer_tangents(MacroCase(name))


@each_name
def test_every_rule_gives_the_same_structure(name):
    """R-47: abstract evaluation, forward, forward rule and reference agree."""
    rules.one_structure(MacroCase(name))


@each_name
def test_jacobians_equal_those_of_the_plain_computation(name):
    """R-42: `jax.jacrev` maps the backward macro over cotangents alone."""
    case = MacroCase(name)
    if case.family.no_derivative is not None:
        pytest.skip(case.family.no_derivative)
    rules.jacobian(case)
