"""Every layer: the exact twin of its functions, in NNX and Linen, alone and stacked."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters import partial_eval

import neuronjax
from neuronjax import nn
from tests.nn_case import CASES

NARROW = jnp.bfloat16
# Each program runs once: it is not worth optimizing.
QUICK = dict(xla_backend_optimization_level=0, xla_llvm_disable_expensive_passes=True)
# Made by `neuronjax.quantize` from the layers whose weights they hold.
MADE_OF_LAYERS = {"QuantizedAttention", "QuantizedMLP"}


def waves(outs):
    """A number that depends on every element of the floating outputs."""
    leaves = [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(
        jnp.vdot(x.ravel(), jnp.cos(jnp.arange(x.size, dtype=x.dtype))).astype(
            "float32"
        )
        for x in leaves
    )


def parts_of(layer):
    """The graph, the parameters and all other state."""
    return nnx.split(layer, nnx.Param, ...)


def calls_of(case, graph):
    """What NNX, the functions and Linen compute of the same arrays."""

    def of(call):
        return lambda params, rest, *inputs: call(
            nnx.merge(graph, params, rest), *inputs
        )

    return dict(layer=of(case.call), twin=of(case.twin), linen=linen_of(case))


def linen_of(case):
    make = lambda **settings: case.make(**settings)  # noqa: E731
    module = nnx.bridge.ToLinen(make, skip_rng=not case.has_parameters)

    def call(params, rest, *inputs):
        variables = dict(params=nnx.to_pure_dict(params))
        for path, value in nnx.to_flat_state(rest):
            variables["SelectionBias"] = {path[0]: value[...]}
        return module.apply(variables, *inputs, nnx_method=case.call)

    return call


def differentiated(case, call):
    """Outputs, and gradients by the parameters and the first input."""

    def total(params, first, rest, *inputs):
        outs = call(params, rest, first, *inputs)
        return waves(outs), outs

    def run(params, rest, first, *inputs):
        if not case.differentiable:
            return total(params, first, rest, *inputs)[1], None
        grad = jax.grad(total, (0, 1), has_aux=True)
        grads, outs = grad(params, first, rest, *inputs)
        return outs, grads

    return run


def text_of(traced):
    """What makes two programs equal; Linen draws initial values and drops them."""
    closed = traced.jaxpr
    consts = [np.asarray(const).tobytes() for const in closed.consts]
    used = [True] * len(closed.jaxpr.outvars)
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return str(needed), *consts, traced.out_tree


@functools.cache
def computed(name):
    """What each of the three computes; equal programs are run once."""
    case = CASES[name]
    graph, params, rest = parts_of(case.layer())
    operands = params, rest, *case.inputs
    results, done = {}, {}
    for kind, call in calls_of(case, graph).items():
        traced = jax.jit(differentiated(case, call)).trace(*operands)
        program = text_of(traced)
        if program not in done:
            done[program] = traced.lower().compile(QUICK)(*operands)
        results[kind] = done[program]
    return results


def same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        # Bytes: packed rows hold the bits of a scale, some of them NaN as fp8.
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_every_layer_has_a_case():
    layers = {
        name
        for name, value in vars(nn).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    }
    assert layers == {name.split(",")[0] for name in CASES} | MADE_OF_LAYERS


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_twin_of_its_functions_to_the_bit(name):
    case, results = CASES[name], computed(name)
    same(results["layer"], results["twin"])
    call = functools.partial(case.call, case.make_new())
    seen = neuronjax.trace(call, *case.inputs)
    assert set(seen.names) == set(case.names)


@pytest.mark.parametrize("name", CASES)
def test_linen_computes_the_same_with_the_same_gradients(name):
    results = computed(name)
    same(results["linen"], results["layer"])


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_gradient(name):
    case = CASES[name]
    if not case.differentiable:
        with pytest.raises(NotImplementedError, match="fp8 codes carry no derivative"):
            nnx.grad(lambda layer: waves(case.call(layer, *case.inputs)))(case.layer())
        return
    params, first = computed(name)["layer"][1]
    for path, grad in [*nnx.to_flat_state(params), (("first input",), first)]:
        grad = np.asarray(grad[...])
        assert np.isfinite(grad).all() and grad.any(), path


def dtypes_of(layer, kind=nnx.Param):
    return {x.dtype for x in jax.tree.leaves(nnx.state(layer, kind))}


def narrowed(x):
    return x.astype(NARROW) if jnp.issubdtype(x.dtype, jnp.floating) else x


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.has_parameters])
def test_parameters_have_the_dtype_of_parameters(name):
    case = CASES[name]
    assert dtypes_of(case.make_new()) == {jnp.dtype("float32")}
    assert dtypes_of(case.make_new(param_dtype=NARROW)) == {jnp.dtype(NARROW)}
    assert dtypes_of(case.make_new(dtype=NARROW)) == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.typed])
def test_a_wide_layer_computes_in_the_dtype_that_it_is_told(name):
    """As one whose parameters and input are of that dtype."""
    case = CASES[name]
    first, *rest = case.inputs
    rest = [narrowed_cache(x) for x in rest]
    told = case.make_new(dtype=NARROW)
    narrow = case.make_new(param_dtype=NARROW) if case.has_parameters else told
    got = jax.eval_shape(lambda *i: case.call(told, *i), first, *rest)
    wanted = jax.eval_shape(lambda *i: case.call(narrow, *i), narrowed(first), *rest)
    assert got == wanted
    if case.has_parameters:
        wide = jax.eval_shape(lambda *i: case.call(case.make_new(), *i), *case.inputs)
        kinds = {x.dtype for x in jax.tree.leaves(wide)}
        assert NARROW not in kinds


def narrowed_cache(x):
    return jax.tree.map(narrowed, x) if isinstance(x, nn.LayerCache) else x


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_carries_a_partition_name_for_each_axis(name):
    layer = CASES[name].layer()
    _, params, _ = parts_of(layer)
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(params)))
    values = nnx.to_flat_state(params)
    assert specs.keys() == {path for path, _ in values}
    for path, value in values:
        spec = getattr(specs[path], "get_value", lambda s=specs[path]: s)()
        assert len(spec) == value[...].ndim, path


STACKABLE = [n for n, c in CASES.items() if c.stackable and c.has_parameters]


@pytest.mark.parametrize("name", STACKABLE)
def test_stacked_layers_are_scanned(name):
    """`nnx.vmap` makes two layers, `nnx.scan` runs one after the other."""
    case = CASES[name]
    first, *rest = case.inputs
    make = lambda rngs: case.make(rngs=rngs)  # noqa: E731
    stack = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: None})
    layers = stack(nnx.Rngs(0).split(2))
    step = nnx.scan(
        lambda x, layer: case.call(layer, x, *rest),
        in_axes=(nnx.Carry, 0),
        out_axes=nnx.Carry,
    )
    graph, state = nnx.split(layers)

    @jax.jit
    def run(state):
        def one(row, x):
            own = jax.tree.map(lambda a: a[row], state)
            return case.call(nnx.merge(graph, own), x, *rest)

        return step(first, nnx.merge(graph, state)), one(1, one(0, first))

    got, wanted = run(state)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
