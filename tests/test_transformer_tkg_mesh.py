"""`transformer_tkg` over ranks and their cores, against float64 and one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding.mesh import make_mesh
from tests import hlo
from tests import transformer_case as case
from tests.transformer_case import (
    error,
    on_mesh,
    operands,
    reference,
    require_close,
    sizes,
)

# Ranks, cores of each, and the path of the residual: alike where a rank has one core.
MESHES = [
    (1, 1, False),
    (2, 1, False),
    (4, 1, True),
    (8, 1, False),
    (1, 2, False),
    (1, 2, True),
    (2, 2, False),
    (2, 2, True),
    (4, 2, False),
    (4, 2, True),
    (3, 1, False),
    (5, 1, True),
    (3, 2, True),
]
EIGHT = sizes(G=8, n=1, D=2, I=16)


def _run(call, tensor, lnc, in_sbuf, **options):
    arrays, rest = case.split(call)
    options |= dict(tensor=tensor, lnc=lnc, sbuf_residual_and_cc=in_sbuf)
    return jax.jit(lambda arrays: on_mesh(arrays, rest, **options))(arrays)


@functools.cache
def _eight(dtype="float32", **changes):
    call = operands(EIGHT | changes, dtype=dtype)
    return call, reference(call)


def _divisible(tensor, dtype="float32"):
    """Eight key/value heads, or as many as there are ranks."""
    changes = {} if 8 % tensor == 0 else dict(G=tensor, I=4 * tensor)
    return _eight(dtype, **changes)


@pytest.mark.parametrize(("tensor", "lnc", "in_sbuf"), MESHES)
def test_every_mesh_computes_the_equations(tensor, lnc, in_sbuf):
    call, wanted = _divisible(tensor)
    require_close(_run(call, tensor, lnc, in_sbuf), wanted, 2e-5)


@pytest.mark.parametrize(("tensor", "lnc", "in_sbuf"), MESHES[3:])
def test_every_mesh_scans_stacked_layers(tensor, lnc, in_sbuf):
    call, wanted = _divisible(tensor)
    require_close(_run(case.stacked(call), tensor, lnc, in_sbuf), wanted, 2e-5)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("tensor", "lnc", "in_sbuf"), [MESHES[i] for i in (3, 6, 7, 9, 11)]
)
def test_bfloat16_on_a_mesh_is_as_close_as_on_one_device(tensor, lnc, in_sbuf, stacked):
    call, wanted = _divisible(tensor, "bfloat16")
    given = case.stacked(call) if stacked else call
    arrays, rest = case.split(given)
    alone = jax.jit(lambda arrays: neuronjax.transformer_tkg(**arrays, **rest))(arrays)
    found = _run(given, tensor, lnc, in_sbuf)
    assert error(found, wanted) <= 2 * error(alone, wanted)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("in_sbuf", [False, True])
def test_quantized_layers_over_ranks_and_cores(in_sbuf, stacked):
    call = operands(EIGHT | dict(quantized=(0, 1) if stacked else (1,)))
    call["clamp_bound"] = 0.4
    given = case.stacked(call) if stacked else call
    require_close(_run(given, 2, 2, in_sbuf), reference(call), 2e-5)


def test_masks_of_one_head_and_active_masks_over_ranks():
    call = operands(EIGHT)
    call["mask_cache"] = call["mask_cache"][:, :, :1]
    call["mask_active"] = jnp.ones((2, 2, 8, 2), bool)
    require_close(_run(call, 2, 2, True), reference(call), 2e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_without_positions_caches_stay_on_every_rank(stacked):
    call = operands(EIGHT) | dict(position_ids=None)
    given = case.stacked(call) if stacked else call
    require_close(_run(given, 2, 2, False), reference(call), 2e-5)


def _loss(run):
    """Of all outputs, each element with a weight of its own."""

    def loss(live, rest):
        output, *caches = run(live | rest)
        outs = output, *(layer for held in caches for layer in held)
        return sum(
            (x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum()
            for x in outs
        )

    return loss


def _gradients(call, run):
    arrays, _ = case.split(call)
    held = ("mask_cache", "position_ids")
    live = {k: x for k, x in arrays.items() if k not in held}
    rest = {k: arrays[k] for k in held}
    return jax.jit(jax.grad(_loss(run)))(live, rest)


@functools.cache
def _gradients_of_one_device(tensor):
    call, _ = _divisible(tensor)
    _, rest = case.split(call)
    return _gradients(call, lambda a: neuronjax.transformer_tkg(**a, **rest))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("tensor", "lnc", "in_sbuf"), [MESHES[i] for i in (0, 1, 3, 5, 8, 9, 10, 11, 12)]
)
def test_gradients_on_a_mesh_are_those_of_one_device(tensor, lnc, in_sbuf, stacked):
    call, _ = _divisible(tensor)
    given = case.stacked(call) if stacked else call
    _, rest = case.split(given)
    mesh = dict(tensor=tensor, lnc=lnc, sbuf_residual_and_cc=in_sbuf)
    got = _gradients(given, lambda a: on_mesh(a, rest, **mesh))
    for name, wanted in _gradients_of_one_device(tensor if 8 % tensor else 1).items():
        wanted = jnp.stack(wanted) if isinstance(wanted, list) else wanted
        found = jnp.stack(got[name]) if isinstance(got[name], list) else got[name]
        assert np.abs(found - wanted).max() <= 2e-5 * np.abs(wanted).max(), name


def _program(stacked, tensor, lnc, in_sbuf):
    call = operands(sizes(L=3, G=4, n=1, I=16))
    arrays, rest = case.split(case.stacked(call) if stacked else call)
    options = dict(tensor=tensor, lnc=lnc, sbuf_residual_and_cc=in_sbuf)
    mesh = make_mesh(tensor=tensor, lnc=lnc)
    return hlo.program(lambda a: on_mesh(a, rest, **options), arrays), mesh


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("in_sbuf", [False, True])
@pytest.mark.parametrize(("tensor", "lnc"), [(2, 1), (4, 2)])
def test_a_layer_has_two_all_reduces_over_the_ranks(tensor, lnc, in_sbuf, stacked):
    """Of all of `H`, or of each core's half; what the cores exchange is apart."""
    found, mesh = _program(stacked, tensor, lnc, in_sbuf)
    layers = 1 if stacked else 3  # a loop's body counts once
    ranks = hlo.along(mesh, "tensor")
    assert found.counts(ranks) == {"all-reduce": 2 * layers}
    columns = 8 // (2 if in_sbuf and lnc == 2 else 1)
    sums = [c for c in found.collectives if c.groups == ranks]
    assert {c.bytes for c in sums} == {2 * 2 * columns * 4}  # tokens and float32
    assert {c.in_loop for c in found.collectives} == {stacked}
    exchanged = {"all-gather": 2 * layers, "reduce-scatter": layers}
    if lnc == 1:
        assert found.counts() == found.counts(ranks)
    else:
        assert found.counts(hlo.along(mesh, "lnc")) == exchanged
        assert sum(found.counts().values()) == 5 * layers


def test_without_groups_nothing_crosses_the_wire():
    call = operands(sizes(G=1))
    arrays, rest = case.split(call)

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest)

    mesh = make_mesh(tensor=2)
    run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    assert hlo.collectives(run, arrays) == {}
    require_close(jax.jit(run)(arrays), reference(call), 2e-5)


def _in_groups(call, groups):
    """Each group of two ranks of four holds the whole model; every rank's output."""
    arrays, rest = case.split(call)
    members = np.zeros(4, int)
    for ranks in groups:
        members[list(ranks)] = range(2)
    specs = {k: case.spec_of(k, x, 1) for k, x in arrays.items()}

    def local(parts):
        mine = jax.tree.map(lambda x: x[0], parts)
        out, *_ = neuronjax.transformer_tkg(
            **mine, **rest, axis="tensor", replica_groups=groups
        )
        return out[None]

    def part(x, spec, rank):
        for axis, name in enumerate(spec):
            if name is not None:
                x = jnp.split(x, 2, axis)[members[rank]]
        return x

    def parts(x, spec):
        return jnp.stack([part(x, spec, rank) for rank in range(4)])

    leaves, tree = jax.tree.flatten(arrays)
    each = tree.flatten_up_to(specs)
    stacks = tree.unflatten(list(map(parts, leaves, each)))
    mesh = make_mesh(tensor=4)
    ranks = P("tensor")
    run = jax.shard_map(local, mesh=mesh, in_specs=(ranks,), out_specs=ranks)
    return run, stacks


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[3, 0], [1, 2]]], ids=str)
def test_several_groups_add_up_apart(groups, stacked):
    call = operands(sizes())
    run, stacks = _in_groups(case.stacked(call) if stacked else call, groups)
    wanted = reference(call)[0]
    for out in jax.jit(run)(stacks):
        assert np.abs(out - wanted).max() <= 2e-5 * np.abs(wanted).max()
    half_layers = 2 if stacked else 4  # a loop's body counts once
    counts = dict.fromkeys(("reduce-scatter", "all-gather"), half_layers)
    assert hlo.collectives(run, stacks) == counts


def test_groups_of_one_rank_add_nothing():
    call = operands(sizes(G=1))
    arrays, rest = case.split(call)
    options = dict(axis="tensor", replica_groups=[[1], [0]])

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, **options)

    run = jax.shard_map(local, mesh=make_mesh(tensor=2), in_specs=P(), out_specs=P())
    assert hlo.collectives(run, arrays) == {}
    require_close(jax.jit(run)(arrays), reference(call), 2e-5)


def test_ranks_that_hold_the_same_weights_add_them_up():
    """What the vendor's reference assumes of a replica group."""
    call = operands(sizes(L=1))
    arrays, rest = case.split(call)
    options = dict(axis="tensor", replica_groups=[[0, 1, 2]])

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, **options)

    run = jax.shard_map(local, mesh=make_mesh(tensor=3), in_specs=P(), out_specs=P())
    tripled = call | {k: [3 * x for x in call[k]] for k in ("W_outs", "W_downs")}
    require_close(jax.jit(run)(arrays), reference(tripled), 2e-5)


def test_ranks_may_be_mapped():
    """As many as there are no devices for, all of them with the same weights."""
    call = operands(sizes(L=1))
    arrays, rest = case.split(call)
    options = dict(axis="tensor", replica_groups=[[*range(16)]])

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, **options)

    mapped = jax.vmap(local, None, axis_size=16, axis_name="tensor")
    out, k_caches, v_caches = jax.jit(mapped)(arrays)
    got = out[3], [x[3] for x in k_caches], [x[3] for x in v_caches]
    times = call | {k: [16 * x for x in call[k]] for k in ("W_outs", "W_downs")}
    require_close(got, reference(times), 2e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_both_routes_compute_the_same(stacked):
    call, wanted = _eight()
    given = case.stacked(call) if stacked else call
    with neuronjax.lowering("composite"):
        require_close(_run(given, 2, 2, True), wanted, 2e-5)
    with neuronjax.plain():
        require_close(_run(given, 2, 2, True), wanted, 2e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axis="ranks"), "to be inside shard_map over axis 'ranks'"),
        (dict(replica_groups=[[0]]), "every rank of 0 to 1 once"),
        (dict(replica_groups=[[0, 0]]), "name every rank from 0 on once"),
        (dict(replica_groups=[[0, 1, 2]]), "every rank of 0 to 1 once"),
        (dict(replica_groups=[[0], []]), "lists of integers, of one length"),
        (dict(replica_groups=[["a", "b"]]), "lists of integers"),
        (dict(replica_groups=[["0", "1"]]), "lists of integers"),
        (dict(replica_groups=[[0, 1.7]]), "lists of integers"),
        (dict(replica_groups=[[0, float("inf")]]), "lists of integers"),
        (dict(replica_groups=[[False, True]]), "lists of integers"),
        (dict(replica_groups=None), "replica_groups for axis 'tensor'"),
        (dict(lnc_axis="tensor"), "other than axis"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_the_mesh_are_refused(options, message):
    arrays, rest = case.split(operands(sizes(G=1)))
    given = dict(axis="tensor", replica_groups=[[0, 1]]) | options

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, **given)

    run = jax.shard_map(local, mesh=make_mesh(tensor=2), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=f"transformer_tkg: .*{message}"):
        jax.eval_shape(run, arrays)


def test_a_core_with_all_columns_is_refused():
    """With two cores each holds half of `W_out`'s columns."""
    call = operands(sizes(G=1))
    arrays, rest = case.split(call)

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, lnc_axis="lnc")

    mesh = make_mesh(tensor=1, lnc=2)
    run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"W_outs\[0\] must have shape \[G\*n\*D, H/c"):
        jax.eval_shape(run, arrays)
