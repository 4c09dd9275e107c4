"""Kernels of users: odd settings, names, gradients and examples."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax

ONE = jnp.ones((), jnp.float32)


def register(kernel, **options):
    return neuronjax.register_kernel("Odd", kernel, **options)


@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        (lambda x, *, n: x + n if type(n) is int else x - 2 * n, (1, 1.0, True)),
        (lambda x, *, n: x + n[0] if type(n[0]) is int else x - n[0], ((1,), (1.0,))),
        (lambda x, *, n: x / jnp.float32(n), (0.0, -0.0)),
    ],
)
def test_settings_that_python_takes_for_equal_are_different_macros(kernel, settings):
    emit = register(kernel)
    wanted = [kernel(ONE, n=n).item() for n in settings]
    assert [emit(ONE, n=n).item() for n in settings] == wanted
    compiled = jax.jit(lambda x: [emit(x, n=n) for n in settings])
    assert [y.item() for y in compiled(ONE)] == wanted
    with neuronjax.lowering("composite"):
        compiled = jax.jit(lambda x: [emit(x, n=n) for n in settings])
        assert [y.item() for y in compiled(ONE)] == wanted


@pytest.mark.parametrize("word", ["self", "tree", "wrt", "outs", "operands", "config"])
@pytest.mark.parametrize("named", [False, True])
def test_a_setting_may_be_called_as_the_macro_calls_its_own(word, named):
    space = {}
    exec(f"def kernel(x, *, {word}=3.0): return x * {word}", space)
    exec(f"def backward(ops, y, dy, *, {word}): return (dy * {word},)", space)
    emit = register(space["kernel"], backward=space["backward"] if named else None)
    assert jax.grad(emit)(ONE).item() == 3
    assert jax.grad(jax.grad(lambda x: emit(x) ** 2))(ONE).item() == 18


def test_an_operand_may_be_called_name():
    emit = register(lambda name: 2 * name, backward=lambda ops, y, dy: (2 * dy,))
    assert jax.grad(lambda x: emit(name=x))(ONE).item() == 2
    (out,) = neuronjax.emit.bir_kernel("Odd", ONE)
    assert out.item() == 2


@pytest.mark.parametrize("name", ["None", "True", "False"])
def test_a_keyword_is_no_name(name):
    with pytest.raises(ValueError, match=f"begins with a capital, got '{name}'"):
        neuronjax.register_kernel(name, lambda x: x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            dict(outputs=lambda *, other: ("a",)),
            r"outputs must take the settings, \(\)",
        ),
        (dict(settings=["n"]), "settings must be .* a mapping, got list"),
        (dict(refuses=["jit"]), "refuses must map transformations to .*, got list"),
        (dict(refuses=dict(jit=None)), "to reasons, .*, got jit without one"),
        (dict(no_derivative=True), "must be None or a reason in words, got True"),
        (dict(no_derivative=" "), "must be None or a reason in words, got ' '"),
    ],
)
def test_options_of_other_kinds_are_refused(options, words):
    with pytest.raises(ValueError, match=f"register_kernel: .*{words}"):
        register(lambda x: x, **options)


@pytest.mark.parametrize("names", [None, "ab", ("a b", "c"), ("a", "a"), ()])
def test_outputs_that_a_function_names_are_checked_too(names):
    emit = register(lambda x: (x, x), outputs=lambda: names)
    with pytest.raises(ValueError, match="Odd: outputs must give different identif"):
        emit(ONE)


def test_the_gradient_of_a_real_operand_is_real():
    emit = register(lambda x: x, backward=lambda ops, y, dy: (lax.complex(dy, dy),))
    with pytest.raises(ValueError, match="gradient of x must be a float array .*compl"):
        jax.grad(emit)(ONE)


@pytest.mark.parametrize("named", [False, True])
def test_the_gradient_of_a_whole_operand_is_whole_on_an_explicit_mesh(named):
    backward = (lambda ops, y, dy: (dy * ops[1], dy * ops[0])) if named else None
    emit = register(lambda x, s: x * s, backward=backward)
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("data")))
        s = jax.device_put(jnp.ones(4), NamedSharding(mesh, P()))
        dx, ds = jax.jit(jax.grad(lambda x, s: emit(x, s).sum(), (0, 1)))(x, s)
        assert [jax.typeof(d).sharding.spec for d in (dx, ds)] == [P("data"), P(None)]
        assert ds.tolist() == [0, 1, 2, 3]


KERNELS = {
    "integers": (lambda x: x + 1, jnp.int32),
    "indices": (lambda x: jnp.argmax(x, -1), None),
    "truths": (lambda x: x > 0, None),
}


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(
    "cell", ["jit", "grad", "scan", "x64", "jacobian", "integer tangents"]
)
def test_kernels_without_floats_are_green_or_say_that_they_have_none(kind, cell):
    kernel, own = KERNELS[kind]

    def example(dtype, batch):
        key = jax.random.key(0)
        return (4 * jax.random.normal(key, (batch, 3))).astype(own or dtype)

    register(kernel, example=example)
    (found,) = neuronjax.check_transformations("Odd", [cell]).cells
    assert found.state.name != "RED", found
    refused = kind == "integers" and cell in ("grad", "jacobian")
    assert (found.state.name == "REFUSED") == refused
