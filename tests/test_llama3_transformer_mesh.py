"""`llama3_transformer` over tensor-parallel ranks, against one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from tests.hlo import program
from tests.llama3_equations import error, operands, reference, sizes

WIDE = sizes(G=4, n=1, H=6, I=8, D=2, S=3)
# How the arrays of the whole model lie over the ranks.
SPECS = dict(
    X=P(),
    W_qkvs=P(None, None, "tensor"),
    W_outs=P(None, "tensor"),
    W_gates=P(None, None, "tensor"),
    W_ups=P(None, None, "tensor"),
    W_downs=P(None, "tensor"),
    W_gamma_qkvs=P(),
    W_gamma_mlps=P(),
    RoPE_cos=P(),
    RoPE_sin=P(),
)


def _mesh(ranks, data=1, kind=AxisType.Auto):
    devices = jax.devices()[: ranks * data]
    return jax.make_mesh(
        (data, ranks), ("data", "tensor"), (kind,) * 2, devices=devices
    )


def _on_ranks(ranks, data=1, kind=AxisType.Auto):
    """The call over a mesh, as a function of the whole model's arrays."""
    rows = dict(X=P("data"), RoPE_cos=P(None, "data"), RoPE_sin=P(None, "data"))
    kept = P(None, "data", "tensor")

    def local(given):
        return neuronjax.llama3_transformer(**given, axis="tensor", output_kv=True)

    return jax.shard_map(
        local,
        mesh=_mesh(ranks, data, kind),
        in_specs=(SPECS | rows,),
        out_specs=(P("data"), kept, kept),
    )


def _alone(given):
    return neuronjax.llama3_transformer(**given, output_kv=True)


def _loss(run, given):
    total = 0.0
    for i, out in enumerate(run(given)):
        total = total + (1 + i) * jnp.sin(out.astype(jnp.float32)).sum()
    return total


@pytest.mark.parametrize(("ranks", "data"), [(1, 1), (4, 1), (2, 2)])
def test_ranks_compute_what_one_device_does(ranks, data):
    """R-43: gains and tables that all hold alike have the gradient of all ranks."""
    given = operands(WIDE)
    run = _on_ranks(ranks, data)
    got = jax.jit(run)(given)
    assert error(got, reference(given, WIDE)) <= 2e-6
    pulled = jax.jit(jax.grad(functools.partial(_loss, run)))(given)
    wanted = jax.jit(jax.grad(functools.partial(_loss, _alone)))(given)
    for name, x in wanted.items():
        assert error([pulled[name]], [x]) <= 1e-5, name


def test_eight_ranks_do_too():
    given = operands(WIDE | dict(G=8))
    got = jax.jit(_on_ranks(8))(given)
    assert error(got, reference(given, WIDE | dict(G=8))) <= 2e-6


def test_second_derivatives_over_ranks_are_those_of_one_device():
    given = operands(WIDE)
    dots = {name: jnp.cos(3 * x) for name, x in given.items()}

    def both(run):
        first = jax.grad(functools.partial(_loss, run))

        def products(given, dots):
            _, pushed = jax.jvp(first, (given,), (dots,))
            norm = lambda g: sum(jnp.vdot(x, x) for x in first(g).values())  # noqa: E731
            return pushed, jax.grad(norm)(given)

        return jax.jit(products)(given, dots)

    got, wanted = both(_on_ranks(2)), both(_alone)
    for a, b in zip(got, wanted, strict=True):
        for name in b:
            assert error([a[name]], [b[name]]) <= 2e-4, name


def test_weights_that_all_ranks_hold_alike_have_the_gradient_of_all():
    """Two ranks of one and the same weights add up twice what one does."""
    given = operands(sizes())
    mesh = _mesh(2)

    def run(given, axis: str | None = "tensor"):
        local = functools.partial(neuronjax.llama3_transformer, axis=axis)
        inside = lambda g: local(**g)  # noqa: E731
        if axis is None:
            return inside(given)
        return jax.shard_map(inside, mesh=mesh, in_specs=(P(),), out_specs=P())(given)

    def doubled(given):
        more = {k: 2 * given[k] for k in ("W_outs", "W_downs")}
        return run(given | more, None)

    got, wanted = (
        jax.jit(jax.value_and_grad(lambda g, f=f: jnp.sin(f(g)).sum()))(given)
        for f in (run, doubled)
    )
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert error([a], [b]) <= 1e-5


def test_a_layer_has_two_all_reduces_and_its_backward_three():
    given = operands(WIDE)
    forward = jax.shard_map(
        lambda g: neuronjax.llama3_transformer(**g, axis="tensor"),
        mesh=_mesh(2),
        in_specs=(SPECS,),
        out_specs=P(),
    )
    assert program(forward, given).places().in_loops == {"all-reduce": 2}
    gradient = jax.grad(lambda g: forward(g).sum())
    places = program(gradient, given).places()
    assert places.in_loops == {"all-reduce": 2 + 3}
    assert set(places.once) == {"all-reduce"}


def test_bfloat16_over_ranks_errs_little_more_than_on_one():
    """Parts are rounded before they cross the wire, and the sum after it."""
    z = sizes(G=4, n=1, H=32, I=32, D=8, S=9, L=3)
    given = operands(z, dtype="bfloat16")
    exact = reference(given, z)
    alone, ranks = (jax.jit(run)(given) for run in (_alone, _on_ranks(4)))
    assert ranks[0].dtype == jnp.bfloat16
    assert error(ranks, exact) <= 2 * error(alone, exact)


def test_an_explicit_mesh_splits_the_batch_outside_of_shard_map():
    """R-50."""
    given = operands(sizes())
    mesh = jax.make_mesh(
        (2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2]
    )
    rows = dict(X=P("data"), RoPE_cos=P(None, "data"), RoPE_sin=P(None, "data"))
    wanted = jax.jit(jax.value_and_grad(functools.partial(_loss, _alone)))(given)
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, rows.get(name, P())))
            for name, x in given.items()
        }
        out = jax.jit(neuronjax.llama3_transformer)(**placed)
        assert jax.typeof(out).sharding.spec[0] == "data"
        got = jax.jit(jax.value_and_grad(functools.partial(_loss, _alone)))(placed)
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert error([jax.device_get(a)], [b]) <= 1e-5


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mapped_ranks_are_one_macro(kind):
    given = operands(WIDE)
    stacked = given | dict(X=jnp.stack([given["X"], 2 * given["X"]]))
    dims = dict.fromkeys(given) | dict(X=0)
    run = jax.vmap(_on_ranks(2, kind=kind), (dims,))
    with jax.set_mesh(_mesh(2, kind=kind)):
        if kind is AxisType.Explicit:
            row = P(None, "data")
            spec = SPECS | dict(X=row, RoPE_cos=row, RoPE_sin=row)
            mesh = _mesh(2, kind=kind)
            stacked = {
                k: jax.device_put(x, NamedSharding(mesh, spec[k]))
                for k, x in stacked.items()
            }
        got = jax.device_get(jax.jit(run)(stacked))
        assert neuronjax.trace(run, stacked).count("Llama3Transformer") == 1
    for i in range(2):
        alone = given | dict(X=(1 + i) * given["X"])
        assert error([x[i] for x in got], reference(alone, WIDE)) <= 2e-6
