"""The transformation table: every macro NAME x every transformation.

A macro joins it by registering; a refusal is declared with its family. The cells are
those of `neuronjax.tools.transformations`, which a user runs on a kernel too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neuronjax.kernels.dtypes import accumulator
from neuronjax.tools import tables
from neuronjax.tools.transformations import CELLS, run_cell
from tests.macro_case import NAMES, MacroCase, assert_close, is_float

GRADIENT = 1e-4


def test_the_table_on_the_docs_page_has_these_columns():
    assert tuple(CELLS) == tables.TRANSFORMATIONS


@pytest.mark.parametrize("transformation", CELLS)
@pytest.mark.parametrize("name", NAMES)
def test_transformation(name, transformation):
    run_cell(name, transformation)


def test_a_foreign_name_is_refused_in_the_contract_words():
    for name in NAMES:
        case = MacroCase(name)
        expected = " or ".join(case.family.guard)
        message = case.family.foreign.format(expected=expected, name="Nonsense")
        with pytest.raises(ValueError, match=message):
            case.family(*case.flat, name="Nonsense")
        with pytest.raises(ValueError, match=message):
            case.family.macro_p.bind(
                *case.flat, name="Nonsense", config=(), tree=case.tree, axes=()
            )


def test_integer_operands_get_float0_tangents():
    """R-45."""
    for name in NAMES:
        case = MacroCase(name)
        if case.family.no_derivative is not None:
            continue
        _, pull = jax.vjp(case.macro, *case.flat)
        outs = case.macro(*case.flat)
        seeds = tuple(
            np.zeros(o.shape, jax.dtypes.float0)
            if jnp.issubdtype(o.dtype, jnp.integer)
            else jnp.ones_like(o)
            for o in outs
        )
        for x, cotangent in zip(case.flat, pull(seeds), strict=True):
            integer = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
            assert (cotangent.dtype == jax.dtypes.float0) == integer
            assert is_float(x) or integer or not np.any(np.float32(cotangent))


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_gives_the_same_structure(name):
    """R-47: abstract evaluation, forward, forward rule and reference agree."""
    case = MacroCase(name)

    def structure(outs):
        return [(x.shape, x.dtype) for x in outs]

    wanted = structure(case.wanted[0])
    assert structure(jax.eval_shape(case.macro, *case.flat)) == wanted
    assert structure(case.macro(*case.flat)) == wanted
    assert len(case.family.output_names(case.config)) == len(wanted)
    if case.family.no_derivative is not None:
        return
    dots = [jnp.ones_like(x) for x in case.live]
    outs, moved = jax.jvp(case.of_floats(case.macro), case.live, dots)
    assert structure(outs) == wanted
    assert [x.shape for x in moved] == [shape for shape, _ in wanted]


@pytest.mark.parametrize("name", NAMES)
def test_jacobians_equal_those_of_the_plain_computation(name):
    """R-42: `jax.jacrev` maps the backward macro over cotangents alone."""
    case = MacroCase(name)
    if case.family.no_derivative is not None:
        pytest.skip(case.family.no_derivative)

    def sums(fun):
        def few(*floats):
            wide = [x for x in case.of_floats(fun)(*floats) if is_float(x)]
            first = wide[0].ravel()[:3]
            return jnp.sin(first.astype(accumulator(first.dtype)))

        return jax.jit(jax.jacrev(few, tuple(range(len(case.live)))))

    got, wanted = (sums(f)(*case.live) for f in (case.macro, case.plain))
    assert_close(got, wanted, GRADIENT)
