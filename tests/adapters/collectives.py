"""Cases of the collectives: the leading axis of an operand is its rank."""

import jax
import numpy as np

import neuronjax
from neuronjax import sharding
from tests import ring_case
from tests.adapters import adapter, take

AXIS = ring_case.AXIS
_RING = dict(num_groups="num_groups", force_hbm_cc="force_hbm_cc")


def on_ranks(function, *arrays):
    """`function` of what each rank has; the results of all ranks, rank first.

    One device is one rank. Where the machine has fewer, ranks are an axis of `vmap`.
    """
    ranks = len(arrays[0])
    if ranks > len(jax.devices()):
        return jax.jit(jax.vmap(function, axis_name=AXIS))(*arrays)
    return jax.jit(ring_case.on_ranks(ring_case.ring_mesh(ranks), function))(*arrays)


def alike(results):
    """What all ranks hold, which must be the same to the bit."""
    first, *rest = np.asarray(results)
    assert all(np.array_equal(first, other, equal_nan=True) for other in rest)
    return results[0]


def _degree(inputs, options):
    return options.get("tp_degree", len(next(iter(inputs.values()))))


@adapter("allgather_compute_matmul")
def allgather_compute_matmul(inputs, options):
    degree, given = _degree(inputs, options), take(options, **_RING)
    given.setdefault("num_groups", 1)

    def run(lhs, rhs):
        return neuronjax.allgather_compute_matmul(lhs, rhs, degree, **given)

    operands = inputs["lhs_per_rank"], inputs["rhs_per_rank"]
    return {"result_per_rank": on_ranks(run, *operands)}


@adapter("fine_grained_allgather")
def fine_grained_allgather(inputs, options):
    degree, given = _degree(inputs, options), take(options, **_RING)
    results = on_ranks(
        lambda x: neuronjax.fine_grained_allgather(x, degree, **given),
        inputs["inp_per_rank"],
    )
    return _whole_and_parts("result", results, given.get("num_groups", 1) == 1)


def _columns(function):
    def run(inputs, options):
        degree, ranks = _degree(inputs, options), len(inputs["inp_per_rank"])
        groups = options.get("replica_groups") or [
            list(range(first, first + degree)) for first in range(0, ranks, degree)
        ]
        results = on_ranks(
            lambda x: function(x, groups, degree), inputs["inp_per_rank"]
        )
        return _whole_and_parts("result", results, len(groups) == 1)

    return run


adapter("allgather_sb2sb")(_columns(neuronjax.allgather_sb2sb))
adapter("allgather_sb2sb_tiled")(_columns(neuronjax.allgather_sb2sb_tiled))


@adapter("all_reduce")
def all_reduce(inputs, options):
    assert options.get("op", "add") == "add"
    groups = options.get("replica_groups")
    results = on_ranks(
        lambda x: sharding.all_reduce(x, AXIS, groups), inputs["inp_per_rank"]
    )
    return _whole_and_parts("out", results, groups is None or len(groups) == 1)


@adapter("all_to_all")
def all_to_all(inputs, options):
    dim = options.get("dim", 0)

    def run(x):
        moved = sharding.all_to_all(jax.numpy.moveaxis(x, dim, 0), AXIS)
        return jax.numpy.moveaxis(moved, 0, dim)

    return {"out_per_rank": on_ranks(run, inputs["inp_per_rank"])}


@adapter("attn_q_batch_shard")
def attn_q_batch_shard(inputs, options):
    given = take(options, gqa_group_size="gqa_group_size")
    given.setdefault("gqa_group_size", len(inputs["inp_per_rank"]))
    layouts = {name.lower(): name for name in ("NBSd", "dBnS")}
    given["layout"] = layouts[options.get("layout", "NBSd").lower()]
    results = on_ranks(
        lambda x: sharding.attn_q_batch_shard(x, axis=AXIS, **given),
        inputs["inp_per_rank"],
    )
    return {"out_per_rank": results}


def _whole_and_parts(name, results, one_group):
    """The result by its two names: what every rank holds, and that of each rank."""
    parts = {f"{name}_per_rank": results}
    return parts | {name: alike(results)} if one_group else parts
