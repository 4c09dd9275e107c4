"""Derivatives of rings and gathers: those of one device, by the mirror macros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.primitives.collectives import names
from neuronjax.sharding import make_mesh
from tests.macro_case import assert_close, error
from tests.ring_case import (
    AXIS,
    DEVICES,
    FAMILIES,
    FUNCTIONS,
    Call,
    Sizes,
    all_of,
    equation,
    on_ranks,
    ring_mesh,
)

MIRRORS = {
    names.MATMUL: {names.MATMUL: 1, names.MATMUL_MIRROR: 1, names.MATMUL_WEIGHT: 1},
    names.MATMUL_MIRROR: {
        names.MATMUL_MIRROR: 1,
        names.MATMUL: 1,
        names.MATMUL_WEIGHT: 1,
    },
    names.MATMUL_WEIGHT: {
        names.MATMUL_WEIGHT: 1,
        names.MATMUL: 1,
        names.MATMUL_MIRROR: 1,
    },
    names.GATHER: {names.GATHER: 1, names.GATHER_MIRROR: 1},
    names.GATHER_MIRROR: {names.GATHER_MIRROR: 1, names.GATHER: 1},
    names.COLUMNS: {names.COLUMNS: 1, names.COLUMNS_MIRROR: 1},
    names.COLUMNS_MIRROR: {names.COLUMNS_MIRROR: 1, names.COLUMNS: 1},
}
WAYS = {1: (False, 1), 2: (True, 1), 3: (False, 2), 5: (True, 1), 8: (False, 1)}
SCRAMBLED = ((3, 0, 6, 1), (7, 2, 5, 4))


def _loss(fun):
    """Of every output, each element with a weight of its own."""

    def scalar(given):
        total = 0.0
        for out in jax.tree.leaves(fun(given)):
            weight = np.cos(np.arange(out.size)).reshape(out.shape)
            total = total + jnp.sum(jnp.sin(out) * weight.astype(out.dtype))
        return total

    return scalar


def _alone(calls):
    """The same on one device, from the equations, in float64."""

    def run(given):
        return [call.wanted(own, jnp) for call, own in zip(calls, given, strict=True)]

    return run


def _wide(given):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), given)


def _exact(transform, calls, *given):
    with jax.enable_x64(True):
        return jax.jit(transform(_loss(_alone(calls))))(*_wide(given))


def _agree(got, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) <= tolerance


def _calls(devices):
    way = WAYS[devices]
    calls = [Call(name, *way) for name in FAMILIES]
    if devices == 8:
        odd = list(FAMILIES)[1::2]
        calls[1::2] = [Call(name, True, groups=SCRAMBLED) for name in odd]
    return calls


@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_are_those_of_one_device(devices):
    calls = _calls(devices)
    given = [call.drawn(devices, whole=False) for call in calls]
    got = jax.jit(jax.grad(_loss(all_of(calls, devices))))(given)
    _agree(got, _exact(jax.grad, calls, given), 1e-5)


def test_second_derivatives_are_those_of_one_device():
    """Forward over reverse, and reverse over reverse."""
    calls = [Call(name, i % 2 == 1) for i, name in enumerate(FAMILIES)]
    given = [call.drawn(3, whole=False) for call in calls]
    moving = jax.tree.map(jnp.cos, given)

    def both(loss):
        def run(given, moving):
            def along(given):
                own = jax.tree.leaves(jax.grad(loss)(given))
                pairs = zip(own, jax.tree.leaves(moving), strict=True)
                return sum(jnp.vdot(g, m) for g, m in pairs)

            forward = jax.jvp(jax.grad(loss), (given,), (moving,))[1]
            return forward, jax.grad(along)(given)

        return run

    got = jax.jit(both(_loss(all_of(calls, 3))))(given, moving)
    _agree(got, _exact(both, calls, given, moving), 2e-5)


def test_derivatives_are_those_that_differences_give():
    calls = [Call(name, sizes=Sizes(1, 2, 2)) for name in FAMILIES]
    with jax.enable_x64(True):
        given = _wide([call.drawn(2, whole=False) for call in calls])
        run = jax.jit(all_of(calls, 2))
        check_grads(run, (given,), order=1, modes=["fwd"], eps=1e-5)
        loss = jax.jit(_loss(all_of(calls, 2)))
        check_grads(loss, (given,), order=2, modes=["rev"], eps=1e-5)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_replicated_operand_gets_its_gradient_once(devices):
    """R-52: the loss counts the gathered result once, however many ranks hold it."""
    rng = np.random.default_rng(52)
    lhs, rhs, c = (rng.standard_normal(s) for s in [(8, 3), (3, 2), (8, 2)])
    mesh, rows = ring_mesh(devices), 8 // devices
    ring = functools.partial(
        neuronjax.allgather_compute_matmul, tp_degree=devices, num_groups=1
    )

    def mean(lhs, rhs, c):
        return lax.pmean(jnp.sum(ring(lhs, rhs) * c), AXIS)

    def own_rows(lhs, rhs, c):
        first = lax.axis_index(AXIS) * rows
        own = lax.dynamic_slice_in_dim(ring(lhs, rhs) * c, first, rows)
        return lax.psum(own.sum(), AXIS)

    specs = P(AXIS), P(), P()
    given = [jnp.asarray(x, jnp.float32) for x in (lhs, rhs, c)]
    given = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(given, specs, strict=True)
    ]
    for local in (mean, own_rows):
        loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(*given)
        np.testing.assert_allclose(d_lhs, c @ rhs.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_rhs, lhs.T @ c, rtol=1e-5, atol=1e-5)
        assert d_lhs.sharding.is_equivalent_to(NamedSharding(mesh, P(AXIS)), 2)
        assert d_rhs.sharding.is_fully_replicated


def test_every_replicated_operand_gets_its_gradient_once():
    """R-43, R-52: of every macro, each operand in turn held whole by all ranks."""
    ranks, cases = 3, []
    for name in FAMILIES:
        operands = Call(name, sizes=Sizes(2, 3, 2)).drawn(ranks, whole=False)
        cases += [(Call(name), operands, i) for i in range(len(operands))]

    def whole(operands, i):
        """What one rank holds of operand `i`, in place of what all hold."""
        return [x[0] if j == i else x for j, x in enumerate(operands)]

    def split(given):
        outs = []
        for (call, _, i), own in zip(cases, given, strict=True):
            specs = tuple(P() if j == i else P(AXIS) for j in range(len(own)))

            def local(*own, call=call, i=i):
                own = [x if j == i else x[0] for j, x in enumerate(own)]
                return call.run(*own)[None]

            mesh = ring_mesh(ranks)
            over = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
            outs.append(over(*own))
        return outs

    def alone(given):
        outs = []
        for (call, _, i), own in zip(cases, given, strict=True):
            every = [jnp.stack([x] * ranks) if j == i else x for j, x in enumerate(own)]
            outs.append(call.wanted(every, jnp))
        return outs

    given = [whole(operands, i) for _, operands, i in cases]
    got = jax.jit(jax.grad(_loss(split)))(given)
    with jax.enable_x64(True):
        wanted = jax.jit(jax.grad(_loss(alone)))(_wide(given))
    _agree(got, wanted, 1e-5)


@pytest.mark.parametrize("hbm", [False, True])
def test_gradients_with_two_cores_of_a_rank(hbm):
    """What both cores hold whole gets one gradient, joined of both cores' rows."""
    given = {f: Call(n).drawn(4, whole=False) for f, n in FUNCTIONS.items()}

    def local(given):
        own = jax.tree.map(lambda x: x[0], given)
        options = dict(lnc_axis="lnc", bidirectional=hbm)
        return [
            getattr(neuronjax, f)(*operands, 4, 1, hbm, **options)[None]
            for f, operands in own.items()
        ]

    mesh = make_mesh(tensor=4, lnc=2)
    split = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))

    def alone(given):
        return [equation(FUNCTIONS[f], own, None, jnp) for f, own in given.items()]

    got = jax.jit(jax.grad(_loss(split)))(given)
    with jax.enable_x64(True):
        wanted = jax.jit(jax.grad(_loss(alone)))(_wide(given))
    _agree(got, wanted, 1e-5)


def test_gradients_come_by_the_mirror_macros():
    """A macro, its transpose, and the weight's where there is one: each once."""
    for name, wanted in MIRRORS.items():
        call = Call(name)
        gradient = jax.grad(_loss(all_of([call], 2)))
        found = neuronjax.trace(gradient, [call.drawn(2)])
        assert {n: found.count(n) for n in FAMILIES if found.count(n)} == wanted


# Name and number in the compiler's list of collectives, which has no reduce-scatter.
_RING = "PermuteImplicit", 9, "interconnect"
RECORDS = dict.fromkeys(FAMILIES, _RING) | {
    names.COLUMNS: ("AllGather", 4, "interconnect"),
    names.COLUMNS_MIRROR: ("ReduceScatter", None, "interconnect"),
}


def test_macros_of_any_order_record_what_they_are():
    """A gradient's is not that of the macro it belongs to."""
    calls = FUNCTIONS | {"allgather_sb2sb": names.COLUMNS}
    given = {f: Call(n).drawn(2, whole=False) for f, n in calls.items()}

    def run(given):
        columns = neuronjax.allgather_sb2sb(*given["allgather_sb2sb"], [[0, 1]], 2)
        rings = [getattr(neuronjax, f)(*given[f], 2, 1) for f in FUNCTIONS]
        return columns, rings

    def total(given):
        slopes = jax.grad(_loss(on_ranks(ring_mesh(2), run)))(given)
        return sum(x.sum() for x in jax.tree.leaves(slopes))

    found = neuronjax.trace(jax.grad(total), given)
    keys = "collective", "collective_kind", "transport"
    records = {(row.name, *map(dict(row.config).get, keys)) for row in found.rows}
    assert records == {(name, *record) for name, record in RECORDS.items()}


def test_mapped_macros_are_one_macro_with_the_same_derivatives():
    """Over either operand and over both, inside `shard_map`."""
    dims = [(1, 2), (0, None), (None, 0)]
    calls = [Call(name) for name in FAMILIES]
    cases = []
    for call in calls:
        own = call.drawn(2, whole=False)
        for way in dims[: 1 + 2 * (len(own) > 1)]:
            mapped = [
                x
                if dim is None
                else jnp.stack([x, x * 2, x - 1], dim + 1)  # the ranks stand first
                for x, dim in zip(own, way, strict=False)
            ]
            cases.append((call, way[: len(own)], mapped))

    def run(given):
        return [
            jax.vmap(call.run, way)(*own)
            for (call, way, _), own in zip(cases, given, strict=True)
        ]

    def alone(given):
        outs = []
        for (call, way, _), own in zip(cases, given, strict=True):
            inner = [None if dim is None else dim + 1 for dim in way]
            each = jax.vmap(lambda *x, call=call: call.wanted(x, jnp), inner, 1)
            outs.append(each(*own))
        return outs

    given = [own for *_, own in cases]
    split = on_ranks(ring_mesh(2), run)
    found = neuronjax.trace(split, given)
    wanted = {c.name: sum(x[0] == c for x in cases) for c in calls}
    assert {n: found.count(n) for n in FAMILIES} == wanted
    got = jax.jit(jax.value_and_grad(_loss(split)))(given)
    with jax.enable_x64(True):
        exact = jax.jit(jax.value_and_grad(_loss(alone)))(_wide(given))
    _agree(got, exact, 2e-5)


def test_layers_in_a_loop_with_recomputation():
    """A scan over layers of gather, product and scatter, with and without remat."""
    ranks, layers, width = 3, 4, 6
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((ranks, 2, width)), jnp.float32)
    up, down = (
        jnp.asarray(rng.standard_normal((ranks, layers, *shape)) / 4, jnp.float32)
        for shape in [(width, 5), (5, width)]
    )

    def layer(x, weights):
        wide = neuronjax.allgather_compute_matmul(x, weights[0], ranks, 1)
        out = neuronjax.matmul_reduce_scatter(jnp.tanh(wide), weights[1], ranks, 1)
        return x + out, None

    def stack(layer, given):
        x, up, down = given
        return lax.scan(layer, x, (up, down))[0]

    def alone(given):
        x, up, down = (x.astype(jnp.float64) for x in given)
        x = x.reshape(-1, width)
        for i in range(layers):
            x = x + sum(
                jnp.tanh(x @ u[i]) @ d[i] for u, d in zip(up, down, strict=True)
            )
        return x.reshape(ranks, -1, width)

    kept = jax.checkpoint_policies.save_only_these_names("collective_matmul_out")
    ways = [layer, jax.checkpoint(layer), jax.checkpoint(layer, policy=kept)]
    given = x, up, down
    with jax.enable_x64(True):
        exact = jax.jit(jax.value_and_grad(_loss(alone)))(_wide(given))
    for way in ways:
        split = on_ranks(ring_mesh(ranks), functools.partial(stack, way))
        _agree(jax.jit(jax.value_and_grad(_loss(split)))(given), exact, 1e-5)


def test_an_export_of_the_gradient_keeps_every_name():
    """R-49: in one program; the composite route names the calls too."""
    calls = [Call(name) for name in FAMILIES]
    given = [call.drawn(2, whole=False) for call in calls]
    gradient = jax.jit(jax.grad(_loss(all_of(calls, 2))))
    wanted = gradient(given)
    placed = jax.device_put(given, NamedSharding(ring_mesh(2), P(AXIS)))
    for route, mark in (("inline", "@"), ("composite", "neuron.")):
        with neuronjax.lowering(route):
            saved = export.export(gradient)(given)
        text = saved.mlir_module()
        assert all(f"{mark}{name}" in text for name in FAMILIES)
        got = export.deserialize(saved.serialize()).call(placed)
        assert_close(got, wanted, 1e-6)


@pytest.mark.parametrize("narrow", ["float16", "bfloat16"])
def test_the_gradient_of_a_wider_rhs_is_not_rounded_to_lhs(narrow):
    lhs, rhs = jnp.full((256, 1), 300, narrow), jnp.full((1, 2), 0.1, "float32")

    def loss(rhs):
        gathered = neuronjax.allgather_compute_matmul(lhs, rhs, 1, 1)
        scattered = neuronjax.matmul_reduce_scatter(lhs, rhs, 1, 1)
        with neuronjax.plain():
            plain = neuronjax.allgather_compute_matmul(lhs, rhs, 1, 1)
        outs = jnp.stack([gathered, scattered, plain]).astype("float32")
        return outs.sum((1, 2))

    got = jax.jit(jax.jacrev(loss))(rhs)
    np.testing.assert_array_equal(got, np.full((3, 1, 2), 256 * 300.0))


def test_low_precision_gradients_err_no_more_than_one_devices():
    """Twice the error of the plain bfloat16 computation, and the operands' dtypes."""
    calls = [Call(name, dtypes=("bfloat16",) * 2) for name in FAMILIES]
    given = [call.drawn(2, whole=False) for call in calls]

    def plain(given):
        return [
            equation(call.name, own, None, jnp)
            for call, own in zip(calls, given, strict=True)
        ]

    got = jax.jit(jax.grad(_loss(all_of(calls, 2))))(given)
    rough = jax.jit(jax.grad(_loss(plain)))(given)
    exact = _exact(jax.grad, calls, given)
    for a, b, c in zip(*map(jax.tree.leaves, (got, rough, exact)), strict=True):
        assert a.dtype == jnp.bfloat16
        assert error(a, c) <= 2 * error(b, c) + 2**-8
