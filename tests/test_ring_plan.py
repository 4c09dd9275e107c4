"""The plan of a ring: its path by the chip's budgets, its channels by the table."""

import math

import jax
import jax.numpy as jnp
import pytest

import neuronjax
from neuronjax import sharding
from neuronjax.sharding import ring_plan

KIB = 1024


def array(rows, columns, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((rows, columns), dtype)


# The table of the specification: by ranks, with two cores and a version of at least 3.
TABLE = {1: 1, 2: 1, 3: 1, 4: 2, 6: 1, 8: 2, 16: 2, 32: 2, 64: 4, 128: 4, 256: 1}


@pytest.mark.parametrize("ranks", TABLE)
def test_channels_follow_the_table(ranks):
    lhs = array(1024, 128)
    plan = ring_plan(lhs, None, ranks, cores=2)
    assert plan.channels == TABLE[ranks]
    assert plan.permutes == TABLE[ranks] * (ranks - 1)
    assert ring_plan(lhs, None, ranks).channels == 1
    older = ring_plan(lhs, None, ranks, cores=2, nc_version=2)
    assert older.channels == (4 if ranks == 32 else TABLE[ranks])


# Bytes of one copy of rhs and of a core's rows, and what two buffers of each decide:
# rhs stays on chip up to 16 MiB, the rows up to what is left of 24 MiB.
PATHS = [
    (8 * KIB, 4 * KIB, True, "sbuf"),
    (8 * KIB, 4 * KIB + 1, True, "hbm"),
    (8 * KIB + 1, 12 * KIB, False, "sbuf"),
    (8 * KIB + 1, 12 * KIB + 1, False, "hbm"),
    (1, 12 * KIB - 1, True, "sbuf"),
    (1, 12 * KIB, True, "hbm"),
]


@pytest.mark.parametrize(("right_kib", "left_kib", "rhs_on_chip", "path"), PATHS)
@pytest.mark.parametrize("cores", [1, 2])
def test_the_path_follows_the_budgets(right_kib, left_kib, rhs_on_chip, path, cores):
    """R-53: of the shapes and dtypes of this call; nothing is tuned, nothing stored."""
    lhs, rhs = array(cores * left_kib, 512), array(512, right_kib)
    plan = ring_plan(lhs, rhs, 2, cores=cores)
    assert (plan.rhs_on_chip, plan.path) == (rhs_on_chip, path)
    assert plan.buffers_bytes == 2 * left_kib * KIB
    assert plan.rhs_bytes == 2 * right_kib * KIB
    forced = ring_plan(lhs, rhs, 2, cores=cores, force_hbm_cc=True)
    assert (forced.path, forced.why) == ("hbm", "force_hbm_cc")
    lhs, rhs = array(left_kib, 512, "float32"), array(512, right_kib, "float32")
    wide = ring_plan(lhs, rhs, 2)
    assert wide.buffers_bytes == 2 * plan.buffers_bytes
    assert wide.rhs_on_chip == (2 * plan.rhs_bytes <= 16 << 20)


def test_the_budget_is_that_of_the_cores_generation():
    lhs = array(16 * KIB, 512)
    paths = [ring_plan(lhs, None, 4, nc_version=v).path for v in (1, 2, 3, 4, 5)]
    assert paths == ["hbm", "hbm", "hbm", "sbuf", "sbuf"]


def test_without_a_product_all_of_the_memory_is_for_what_travels():
    assert ring_plan(array(12 * KIB, 512), None, 4).path == "sbuf"
    assert ring_plan(array(12 * KIB + 1, 512), None, 4).path == "hbm"


def test_sums_travel_wide():
    scatters = ring_plan(array(4 * 64, 32), array(32, 16), 4, scatters=True)
    assert scatters.buffers_bytes == 2 * 64 * 16 * 4
    gathers = ring_plan(array(64, 32), array(32, 16), 4)
    assert gathers.buffers_bytes == 2 * 64 * 32 * 2
    wide = ring_plan(array(4 * 64, 32, "float64"), None, 4, scatters=True)
    assert wide.buffers_bytes == 2 * 64 * 32 * 8


def test_sums_travel_as_wide_as_either_operand():
    mixed = ring_plan(array(8, 3), array(3, 5, "float64"), 2, scatters=True)
    assert mixed.buffers_bytes == 2 * 4 * 5 * 8


def test_only_two_cores_have_several_channels():
    assert ring_plan(array(12, 3), None, 4, cores=3).channels == 1


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("force", [False, True])
def test_the_view_holds_a_ranks_rows_once(ranks, cores, force):
    plan = ring_plan(array(64, 8), None, ranks, cores=cores, force_hbm_cc=force)
    assert math.prod(plan.view) == 64
    assert plan.view[plan.core_axis] == cores
    assert plan.view[1 - plan.core_axis] == plan.channels
    assert plan.core_axis == (1 if force else 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(tp_degree=0), "tp_degree must be a positive integer, got 0"),
        (dict(cores=2.0), "cores must be a positive integer, got 2.0"),
        (dict(nc_version=None), "nc_version must be a positive integer, got None"),
        (dict(force_hbm_cc=1), "force_hbm_cc must be a bool, got 1"),
        (dict(lhs=jnp.ones(3)), r"lhs must have 2 axes, got \(3,\)"),
        (dict(rhs=jnp.ones((1, 3, 2))), r"rhs must have 2 axes, got \(1, 3, 2\)"),
        (dict(lhs=None), "lhs must be an array, got None"),
        (dict(rhs=[[1.0]]), r"rhs must be an array, got \[\[1.0\]\]"),
        (
            dict(rhs=array(4, 2)),
            r"K of lhs \(6, 3\) and of rhs \(4, 2\) must be equal",
        ),
        (dict(lhs=array(6, 3, "int32")), "lhs must be bfloat16, .*, got int32"),
        (
            dict(lhs=array(8, 3, "int8"), rhs=None, scatters=True),
            "lhs must be bfloat16, .*, got int8",
        ),
        (dict(cores=2), "rows of lhs must be a multiple of 4"),
        (dict(scatters=True), "rows of lhs must be a multiple of 4"),
    ],
)
def test_a_plan_refuses(arguments, words):
    given = dict(lhs=array(6, 3), rhs=array(3, 2), tp_degree=4) | arguments
    lhs, rhs, degree = given.pop("lhs"), given.pop("rhs"), given.pop("tp_degree")
    with pytest.raises(ValueError, match=f"^ring_plan: .*{words}"):
        ring_plan(lhs, rhs, degree, **given)


def test_the_emitted_ring_is_the_planned_one():
    """Path, channels, kind and transport stand in the config bag, for `trace`."""
    mesh = sharding.make_mesh(tensor=4, lnc=2)
    spec = jax.sharding.PartitionSpec

    def run(lhs, rhs):
        return neuronjax.allgather_compute_matmul(
            lhs, rhs, 4, 1, True, lnc_axis="lnc", bidirectional=True
        )

    split = jax.shard_map(
        run, mesh=mesh, in_specs=(spec(), spec()), out_specs=spec("tensor")
    )
    (row,) = neuronjax.trace(split, jnp.ones((8, 3)), jnp.ones((3, 2))).rows
    plan = ring_plan(array(8, 3), array(3, 2), 4, cores=2, force_hbm_cc=True)
    assert (
        row.name == "CollectiveMatmul" and row.shapes[0] == "f32[4,3]{V:(tensor,lnc)}"
    )
    assert dict(row.config) == dict(
        axis="tensor",
        groups=None,
        channels=plan.channels,
        bidirectional=True,
        path=plan.path,
        collective="PermuteImplicit",
        collective_kind=9,
        transport="interconnect",
    )
