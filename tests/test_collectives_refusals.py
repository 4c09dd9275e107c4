"""What the collectives refuse on their mesh, and what the chip alone does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import emit, sharding
from neuronjax.primitives.collectives.facts import RINGS, SB2SB, SCATTERS
from tests import ring_case

PRODUCTS = ("allgather_compute_matmul", "matmul_reduce_scatter")
RIGHT = jnp.ones((3, 2))


def on_mesh(function, x, *, ranks=4, lnc=1):
    """`function` of an operand that is alike everywhere; all results, rank first."""
    mesh = sharding.make_mesh(tensor=ranks, lnc=lnc)
    stacked = jnp.broadcast_to(x, (mesh.size, *x.shape))
    return jax.jit(ring_case.on_ranks(mesh, function))(stacked)


def ring(name, x, *args, **options):
    """A function over a ring, whatever its operands are."""
    right = (RIGHT,) if name in PRODUCTS else ()
    return getattr(neuronjax, name)(x, *right, *args, **options)


def refusal(function, *args, **kwargs):
    """The one line in which a call is refused."""
    with pytest.raises(ValueError) as refused:
        function(*args, **kwargs)
    (line,) = str(refused.value).splitlines()
    return line


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize(("degree", "groups"), [(2, 1), (2, 4), (8, 1), (1, 1)])
def test_an_axis_of_another_size_is_refused(name, degree, groups):
    def run(x):
        return ring(name, x, degree, groups)

    devices = degree * groups
    assert refusal(on_mesh, run, jnp.ones((16, 3))) == (
        f"{name}: axis must be a mesh axis of {devices} devices, one a rank, and the "
        "call inside its shard_map, got 'tensor' of 4"
    )


@pytest.mark.parametrize("name", RINGS)
def test_an_axis_that_is_not_bound_is_refused(name):
    assert refusal(ring, name, jnp.ones((16, 3)), 4, 1) == (
        f"{name}: axis must be a mesh axis of 4 devices, one a rank, and the call "
        "inside its shard_map, got 'tensor', not bound"
    )


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        (
            "allgather_compute_matmul",
            6,
            "m, the rows of lhs, must be a multiple of 4: a rank has 2 cores of 2 "
            "channels, got 6",
        ),
        (
            "fine_grained_allgather",
            6,
            "m, the rows of lhs, must be a multiple of 4: a rank has 2 cores of 2 "
            "channels, got 6",
        ),
        (
            "matmul_reduce_scatter",
            24,
            "the rows of lhs must be a multiple of 16: there are 4 ranks of 2 cores of "
            "2 channels, got 24",
        ),
        (
            "fine_grained_reduce_scatter",
            24,
            "the rows of lhs must be a multiple of 16: there are 4 ranks of 2 cores of "
            "2 channels, got 24",
        ),
    ],
)
def test_rows_that_cores_and_channels_cannot_share_are_refused(name, rows, words):
    def run(x):
        return ring(name, x, 4, 1, lnc_axis="lnc")

    line = refusal(on_mesh, run, jnp.ones((rows, 3)), lnc=2)
    assert line == f"{name}: {words}"


@pytest.mark.parametrize("name", PRODUCTS)
def test_widths_that_differ_are_refused(name):
    assert refusal(ring, name, jnp.ones((4, 5)), 1, 1) == (
        f"{name}: K of lhs (4, 5) and of rhs (3, 2) must be equal"
    )


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "fine_grained_allgather"])
def test_several_wrong_arguments_are_told_at_once(name):
    with pytest.raises(ValueError) as refused:
        ring(name, jnp.ones((4, 3)), 0, 1, raw=1, axis=None)
    assert str(refused.value).splitlines() == [
        f"{name}: tp_degree = 0: it must be a positive integer, known while tracing",
        f"{name}: raw = 1: it must be True or False, known while tracing",
        f"{name}: axis must be the name of one mesh axis, got None",
    ]


@pytest.mark.parametrize("name", RINGS)
def test_lists_are_no_tensors(name):
    with pytest.raises(ValueError, match=r"lhs must have shape .*, got \(\)"):
        ring(name, [[1.0, 2.0, 3.0]], 1, 1)


@pytest.mark.parametrize("name", (*RINGS, "allgather_sb2sb_tiled"))
def test_cores_that_exchange_unchecked_are_refused(name):
    """There a gradient would be halved. A mapped axis is never checked."""

    def run(x, **options):
        if name in SB2SB:
            return neuronjax.allgather_sb2sb_tiled(x, [[0]], 1, lnc_axis="lnc")
        return ring(name, x, 1, 1, lnc_axis="lnc", **options)

    x = jnp.ones((2, 256, 3))
    assert refusal(jax.vmap(run, axis_name="lnc"), x) == (
        f"{name}: lnc_axis must be a mesh axis, and the call inside its shard_map, "
        "which must check varying axes (its default), got 'lnc', unchecked"
    )
    if name in RINGS:  # raw results are not exchanged
        parts = jax.vmap(lambda x: run(x, raw=True), axis_name="lnc")(x)
        assert parts.shape[-2] == 128


@pytest.mark.parametrize("name", SB2SB)
@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [2, 3], [4, 5]]])
def test_replica_groups_of_another_axis_are_refused(name, groups):
    def run(x):
        return getattr(neuronjax, name)(x, groups, 2)

    assert refusal(on_mesh, run, jnp.ones((2, 3))) == (
        f"{name}: axis must be a mesh axis of {2 * len(groups)} devices, one a rank, "
        "and the call inside its shard_map, got 'tensor' of 4"
    )


@pytest.mark.parametrize("name", SB2SB)
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[3], [2], [1], [0]]])
def test_replica_groups_of_another_degree_are_refused(name, groups):
    def run(x):
        return getattr(neuronjax, name)(x, groups, 2)

    assert refusal(on_mesh, run, jnp.ones((2, 3))) == (
        f"{name}: each list of replica_groups must have tp_degree = 2 ranks, got "
        f"[{len(groups[0])}]"
    )


@pytest.mark.parametrize("name", SB2SB)
@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[]],
        [[0, 1], [2]],
        [[0, 1], [1, 2]],
        [[0, 4]],
        [["a"]],
        [[False, True]],
        "01",
        None,
    ],
)
def test_replica_groups_that_are_no_partition_are_refused(name, groups):
    line = refusal(getattr(neuronjax, name), jnp.ones((2, 3)), groups, 2)
    assert line == (
        f"{name}: replica_groups must be lists of ranks, all of one length, that name "
        f"each of 0 to n - 1 once, got {groups}"
    )


def test_an_emitter_refuses_groups_that_do_not_cover_its_axis():
    def run(x):
        groups = ((0, 1), (2, 3), (4, 5))
        return emit.fine_grained_all_gather_kernel(x, axis="tensor", groups=groups)

    assert refusal(on_mesh, run, jnp.ones((2, 3))) == (
        "fine_grained_all_gather_kernel: groups must name each of the 4 ranks of axis "
        "once, got ((0, 1), (2, 3), (4, 5))"
    )


def test_an_emitter_refuses_sums_that_its_ranks_cannot_share():
    def run(x):
        return emit.matmul_reduce_scatter_kernel(x, RIGHT, axis="tensor", channels=2)

    assert refusal(on_mesh, run, jnp.ones((12, 3))) == (
        "matmul_reduce_scatter_kernel: the rows of lhs must be a multiple of 8, ranks "
        "times channels, got 12"
    )


@pytest.mark.parametrize("name", RINGS)
def test_the_chip_alone_asks_for_an_even_degree_and_one_direction(name):
    x = jax.ShapeDtypeStruct((9, 3), "float32")
    right = (RIGHT,) if name in PRODUCTS else ()
    report = neuronjax.can(name, x, *right, 3, 1, bidirectional=True)
    hw = {v.id for v in report.violations if v.tag == "hw"}
    assert hw == {"collectives.chip_degree", "collectives.chip_direction"}
    assert report.nearest["tp_degree"] == 4
    out = on_mesh(
        lambda x: ring(name, x, 3, 1, bidirectional=True), jnp.ones((9, 3)), ranks=3
    )
    # Of ones: a product adds 3 of them, a sum one of each of the 3 ranks.
    value = 3.0 ** ((name in PRODUCTS) + (name in SCATTERS))
    rows, columns = 3 if name in SCATTERS else 27, 2 if name in PRODUCTS else 3
    np.testing.assert_array_equal(out, np.full((3, rows, columns), value))


@pytest.mark.parametrize(
    ("name", "rows", "lnc", "rule"),
    [
        ("allgather_sb2sb", 129, 1, "chip_rows"),
        ("allgather_sb2sb_tiled", 129, 1, "chip_tiles"),
        ("allgather_sb2sb_tiled", 384, 2, "chip_cores"),
    ],
)
def test_the_chip_alone_asks_for_whole_tiles(name, rows, lnc, rule):
    options = dict(lnc_axis="lnc") if lnc == 2 else {}

    def run(x):
        return getattr(neuronjax, name)(x, [[0, 1]], 2, **options)

    x = jax.ShapeDtypeStruct((rows, 3), "float32")
    report = neuronjax.can(name, x, [[0, 1]], 2, **options)
    assert {v.id for v in report.violations if v.tag == "hw"} == {f"collectives.{rule}"}
    out = on_mesh(run, jnp.ones((rows, 3)), ranks=2, lnc=lnc)
    assert out.shape[-2:] == (rows, 6)


def test_can_says_yes_inside_the_mesh():
    found = []

    def run(x):
        found.append(neuronjax.can("allgather_compute_matmul", x, RIGHT, 4, 1))
        return x

    on_mesh(run, jnp.ones((4, 3)))
    assert found[0] and found[0].on_chip


@pytest.mark.parametrize(
    ("function", "x", "words"),
    [
        (
            lambda x: sharding.all_reduce(x, "tensor", [[0, 1], [2, 2]]),
            (4,),
            "all_reduce: replica_groups must be lists of ranks, all of one length, "
            r"that name each of 0 to 3 once, got \[\[0, 1\], \[2, 2\]\]",
        ),
        (
            lambda x: sharding.all_to_all(x, "tensor"),
            (6, 2),
            "all_to_all: the first axis of x must be a multiple of the 4 ranks of "
            r"'tensor', got shape \(6, 2\)",
        ),
        (
            lambda x: sharding.attn_q_batch_shard(x, "SBNd", gqa_group_size=2),
            (1, 2, 3, 4),
            "attn_q_batch_shard: layout must be one of NBSd, dBnS, got 'SBNd'",
        ),
        (
            lambda x: sharding.attn_q_batch_shard(x, gqa_group_size=3),
            (1, 2, 3, 4),
            "attn_q_batch_shard: gqa_group_size must be a positive integer that "
            "divides the 4 ranks of 'tensor', got 3",
        ),
        (
            lambda x: sharding.attn_q_batch_shard(x, "dBnS", gqa_group_size=2),
            (4, 2, 2, 3),
            r"attn_q_batch_shard: x must have shape \[d, B, 1, S\], got \(4, 2, 2, 3\)",
        ),
        (
            lambda x: sharding.attn_q_batch_shard(x, gqa_group_size=2),
            (1, 3, 3, 4),
            "attn_q_batch_shard: the batch must be a multiple of gqa_group_size = 2, "
            "got 3",
        ),
    ],
)
def test_plain_collectives_refuse(function, x, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        on_mesh(function, jnp.ones(x))


PLAIN = {
    "all_reduce": lambda x: sharding.all_reduce(x, "tensor"),
    "all_to_all": lambda x: sharding.all_to_all(x, "tensor"),
    "attn_q_batch_shard": lambda x: sharding.attn_q_batch_shard(x, gqa_group_size=1),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("x", [[[1.0]], None, "a"])
def test_plain_collectives_take_arrays(name, x):
    def run(_):
        return PLAIN[name](x)

    call = jax.vmap(run, axis_name="tensor")
    assert refusal(call, jnp.ones(2)) == f"{name}: x must be an array, got {x!r}"
    x = np.array("a")
    assert refusal(call, jnp.ones(2)) == f"{name}: x must be an array, got ndarray"


@pytest.mark.parametrize("groups", [None, [[0], [1]]])
def test_sums_are_of_numbers(groups):
    def run(x):
        return sharding.all_reduce(x, "tensor", groups)

    line = refusal(jax.vmap(run, axis_name="tensor"), jnp.ones((2, 3), bool))
    assert line == "all_reduce: x must hold numbers, got bool"


def test_plain_collectives_need_their_axis():
    for call in (sharding.all_reduce, sharding.all_to_all):
        with pytest.raises(ValueError, match="axis must be a mesh axis, .* got 'data'"):
            call(jnp.ones(4), "data")
    with pytest.raises(ValueError, match="axis must be a mesh axis, .* got 'tensor'"):
        sharding.attn_q_batch_shard(jnp.ones((1, 2, 3, 4)), gqa_group_size=2)


@pytest.mark.parametrize(
    ("function", "left", "right", "words"),
    [
        (
            sharding.sharded_allgather_matmul,
            (6, 3),
            (3, 4),
            "lhs must have 2 axes, its axis 0 a multiple of the 4 devices of 'tensor'",
        ),
        (
            sharding.sharded_allgather_matmul,
            (8, 3),
            (3, 6),
            "rhs must have 2 axes, its axis 1 a multiple of the 4 devices of 'tensor'",
        ),
        (
            sharding.sharded_matmul_reduce_scatter,
            (8, 6),
            (6, 4),
            "lhs must have 2 axes, its axis 1 a multiple of the 4 devices of 'tensor'",
        ),
        (
            sharding.sharded_matmul_reduce_scatter,
            (6, 8),
            (8, 4),
            "the rows of lhs must be a multiple of 4: there are 4 ranks",
        ),
    ],
)
def test_products_over_a_mesh_refuse(function, left, right, words):
    mesh = sharding.make_mesh(tensor=4)
    with pytest.raises(ValueError, match=words):
        function(mesh, jnp.ones(left), jnp.ones(right))
    with pytest.raises(ValueError, match="axis must be an axis of the mesh"):
        function(mesh, jnp.ones((8, 8)), jnp.ones((8, 8)), axis="expert")


@pytest.mark.parametrize(
    "name", ["sharded_allgather_matmul", "sharded_matmul_reduce_scatter"]
)
def test_products_over_a_mesh_refuse_what_is_no_mesh_axis_or_array(name):
    function, mesh = getattr(sharding, name), sharding.make_mesh(tensor=1)
    ones = jnp.ones((2, 2))
    assert refusal(function, None, ones, ones) == (
        f"{name}: mesh must be a jax.sharding.Mesh, got None"
    )
    assert refusal(function, mesh, ones, ones, axis=None) == (
        f"{name}: axis must be the name of a mesh axis, got None"
    )
    assert refusal(function, mesh, ones, [[1.0]]) == (
        f"{name}: rhs must be an array, got [[1.0]]"
    )
