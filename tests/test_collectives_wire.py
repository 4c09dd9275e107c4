"""What rings put on the wire, what waits for what, and what they hold at once."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.primitives.collectives import names
from neuronjax.sharding import make_mesh
from tests.hlo import Program, along, collectives, groups_of, program, temporaries
from tests.ring_case import (
    AXIS,
    FAMILIES,
    FUNCTIONS,
    RINGS,
    Call,
    Sizes,
    all_of,
    calls,
    on_ranks,
    permutes,
    ring_mesh,
    shapes,
)

PERMUTE = "collective-permute"


def test_the_pulled_back_ring_shares_the_forward_one():
    """Forward and gradients of both operands: twice the forward's permutes.

    The ring of the forward pass, which the weight's gradient takes up, and the mirror.
    """
    devices, every = 3, [call for call in calls(3) if call.name in RINGS]
    given = [call.drawn(devices) for call in every]
    run = all_of(every, devices)

    def both(given, cotangents):
        outs, pull = jax.vjp(run, given)
        return outs, pull(cotangents)

    found = program(both, given, jax.eval_shape(run, given))
    wanted = {c.sizes.width: 2 * c.channels * (devices - 1) for c in every}
    assert permutes(found) == wanted
    assert found.counts() == {PERMUTE: sum(wanted.values())}


@pytest.mark.parametrize("name", [names.MATMUL, names.MATMUL_MIRROR])
def test_the_gradient_of_one_operand_is_one_ring(name):
    """What nothing reads is not exchanged."""
    call = Call(name)
    operands, run = call.drawn(4), all_of([call], 4)
    cotangent = jax.eval_shape(run, [operands])[0]
    for i in range(2):

        def gradient(x, given, cotangent, i=i):
            fun = lambda x: run([given[:i] + [x] + given[i + 1 :]])[0]  # noqa: E731
            return jax.vjp(fun, x)[1](cotangent)

        assert collectives(gradient, operands[i], operands, cotangent) == {PERMUTE: 3}


def _steps(found: Program) -> tuple[list, list]:
    """Permutes and products, each with how many permutes it waits for."""
    moves, products = found.find(PERMUTE), found.products()

    def depth(op):
        needed = found.needs(op)
        return sum(move.name in needed for move in moves)

    return [(depth(op), op) for op in moves], [(depth(op), op) for op in products]


DEPTHS = {
    (False, 1): [0, 1, 2, 3, 4],
    (True, 1): [0, 1, 1, 2, 2],
    (False, 2): [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
}


@pytest.mark.parametrize("way", DEPTHS)
@pytest.mark.parametrize("name", [names.MATMUL, names.MATMUL_WEIGHT])
def test_the_next_permute_does_not_wait_for_the_product(name, way):
    """Double buffering, from what depends on what in the compiled program.

    The product of step k waits for the k permutes that brought its rows, or for half
    as many where they come both ways; the permute of step k + 1 for no product of
    step k or later.
    """
    call = Call(name, *way)
    found = program(all_of([call], 5), [call.drawn(5)])
    moves, products = _steps(found)
    assert sorted(depth for depth, _ in products) == DEPTHS[way]
    assert sorted(depth for depth, _ in moves) == [x - 1 for x in DEPTHS[way] if x]
    for step, move in moves:
        needed = found.needs(move)
        assert not any(op.name in needed for at, op in products if at >= step)


@pytest.mark.parametrize("way", DEPTHS)
def test_the_next_product_does_not_wait_for_the_sum(way):
    """The mirror: a sum waits for its parts, and no product for a sum on its way."""
    call = Call(names.MATMUL_MIRROR, *way)
    found = program(all_of([call], 5), [call.drawn(5)])
    moves, products = _steps(found)
    assert [depth for depth, _ in products] == [0] * 5 * call.channels
    for step, move in moves:
        needed = found.needs(move)
        assert sum(op.name in needed for _, op in products) == step + 1


def _pulled(fun, *given):
    """The compiled gradient of `fun`, given that of its result."""

    def run(given, cotangent):
        return jax.vjp(fun, *given)[1](cotangent)

    return program(run, given, jax.eval_shape(fun, *given))


def _described(*sizes):
    """Operands of a product on 8 ranks, by rows, K and N of a rank."""
    return [
        [
            jax.ShapeDtypeStruct((8, *shape), jnp.float32)
            for shape in shapes(names.MATMUL, 8, Sizes(*sizes))
        ]
    ]


def _gathered_first(given):
    return FAMILIES[names.MATMUL].plain(*given[0], name=names.MATMUL, axis=AXIS)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_rows_of_all_ranks_are_never_held_at_once(bidirectional):
    """No array of `[tp * m, K]`, forward or in the gradient."""
    given, gathered = _described(64, 512, 48), 8 * 64 * 512
    ring = all_of([Call(names.MATMUL, bidirectional)], 8)
    assert not program(ring, given).large(gathered)
    assert not _pulled(ring, given).large(gathered)
    whole = on_ranks(ring_mesh(8), _gathered_first)
    assert program(whole, given).large(gathered)


# Rows, K and N of each of 8 ranks; the ring's temporaries as a part of those of an
# all-gather and a product, one way and both ways.
MEMORY = {
    (64, 512, 48): (0.27, 0.42),
    (64, 512, 256): (0.38, 0.63),
    (64, 512, 512): (0.5, 1.0),
    (64, 48, 512): (2.92, 6.92),
}


@pytest.mark.parametrize("sizes", MEMORY, ids=str)
def test_what_a_ring_holds_follows_from_its_widths(sizes):
    """One way: two chunks of rows and two blocks of the result, beside the result.

    On 8 ranks at most 0.4 of what a gather needs where N is at most 0.6 K, and more
    than it where N is several times K.
    """
    given, (rows, width, other) = _described(*sizes), sizes
    whole = temporaries(on_ranks(ring_mesh(8), _gathered_first), given)
    assert whole >= 4 * 8 * rows * width
    for bidirectional, wanted in zip((False, True), MEMORY[sizes], strict=True):
        ring = all_of([Call(names.MATMUL, bidirectional)], 8)
        assert temporaries(ring, given) / whole == pytest.approx(wanted, abs=0.01)
    formula = 2 * (width + other) / (8 * width)
    assert MEMORY[sizes][0] == pytest.approx(formula, rel=0.03)


@pytest.mark.parametrize("hbm", [False, True])
def test_two_cores_join_their_parts_in_one_gather(hbm):
    """Four ranks of two cores: two channels of three permutes, and one all-gather.

    None of it where the kernel's own axes are asked for.
    """
    mesh, found = make_mesh(tensor=4, lnc=2), {}
    for function, name in FUNCTIONS.items():
        given = [jnp.repeat(x, 2, 0) for x in Call(name).drawn(4)]
        for raw in (False, True):

            def run(*own, function=function, raw=raw):
                options = dict(lnc_axis="lnc", raw=raw, bidirectional=hbm)
                return getattr(neuronjax, function)(*own, 4, 1, hbm, **options)

            found[raw] = program(on_ranks(mesh, run), *given)
        assert found[True].counts() == {PERMUTE: 6}
        assert found[False].counts() == {PERMUTE: 6, "all-gather": 1}
        assert found[False].counts(along(mesh, AXIS)) == {PERMUTE: 6}
        assert found[False].counts(along(mesh, "lnc")) == {"all-gather": 1}


def test_gradients_of_rows_that_two_cores_share_are_joined_in_one_sum():
    """Back: the mirror's rings, and one all-reduce over the cores."""
    mesh = make_mesh(tensor=4, lnc=2)
    for function in ("fine_grained_allgather", "fine_grained_reduce_scatter"):

        def local(x, function=function):
            return getattr(neuronjax, function)(x[0], 4, lnc_axis="lnc")[None]

        split = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        found = _pulled(split, *Call(FUNCTIONS[function]).drawn(4))
        assert found.counts(along(mesh, AXIS)) == {PERMUTE: 6}
        assert found.counts(along(mesh, "lnc")) == {"all-reduce": 1}
        assert found.counts() == {PERMUTE: 6, "all-reduce": 1}


@pytest.mark.parametrize(("rows", "shared"), [(4, False), (256, True)])
def test_columns_are_one_gather_and_back_one_reduce_scatter(rows, shared):
    """Cores that share tiles exchange them in one gather more, and back in a sum."""
    mesh = make_mesh(tensor=4, lnc=2)

    def local(x):
        options = dict(lnc_axis="lnc") if shared else {}
        return neuronjax.allgather_sb2sb_tiled(x[0], [[0, 1, 2, 3]], 4, **options)[None]

    split = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    x = jnp.ones((4, rows, 3))
    found, back = program(split, x), _pulled(split, x)
    assert found.counts(along(mesh, AXIS)) == {"all-gather": 1}
    assert back.counts(along(mesh, AXIS)) == {"reduce-scatter": 1}
    assert found.counts(along(mesh, "lnc")) == ({"all-gather": 1} if shared else {})
    assert back.counts(along(mesh, "lnc")) == ({"all-reduce": 1} if shared else {})
    assert len(found.collectives) == len(back.collectives) == 1 + shared


def test_a_ring_in_a_loop_counts_once_for_its_body():
    mesh = ring_mesh(3)
    x = jnp.ones((3, 2, 4))
    weights = jnp.ones((3, 5, 4, 4))

    def layers(x, weights):
        def body(x, w):
            wide = neuronjax.allgather_compute_matmul(x, w, 3, 1)
            return neuronjax.matmul_reduce_scatter(wide, w, 3, 1), None

        return lax.scan(body, x, weights)[0]

    found = program(on_ranks(mesh, layers), x, weights)
    assert found.places() == ({PERMUTE: 4}, {})


def test_groups_of_devices_are_read_in_every_form():
    """As XLA writes them: lists, a grid of numbers, axes of a mesh, or who sends."""
    mesh = make_mesh(a=2, b=2, c=2)
    grid = "replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true"
    assert groups_of(grid) == along(mesh, "a")
    assert groups_of("replica_groups=[2,4]<=[8], dimensions={0}") == along(mesh, *"bc")
    lists = "replica_groups={{0,1,4,5},{2,3,6,7}}, dimensions={0}"
    assert groups_of(lists) == along(mesh, "a", "c")
    named = "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}, to_apply=%add"
    assert groups_of(named) == along(mesh, "a", "c")
    ring = "source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}"
    assert groups_of(ring) == along(mesh, "b")
    with pytest.raises(ValueError, match="cannot read"):
        groups_of("channel_id=1")


def test_what_a_program_gathers_first_is_seen_to_be_waited_for():
    """The searches above find what they look for: a gather before its product."""

    def run(lhs, rhs):
        return lax.all_gather(lhs, AXIS, tiled=True) @ rhs

    given = Call(names.MATMUL, sizes=Sizes(4, 3, 5)).drawn(2)
    found = program(on_ranks(ring_mesh(2), run), *given)
    (gather,), (product,) = found.find("all-gather"), found.products()
    assert gather.name in found.needs(product)
    assert product.name not in found.needs(gather)
    assert [c.bytes for c in found.collectives] == [4 * 3 * 4]
    assert (8, 5) in found.large(8 * 5) and not found.large(8 * 5 + 1)
