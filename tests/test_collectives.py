"""Rings and gathers give what their equations say, on any number of ranks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  names bfloat16
import numpy as np
import pytest

import neuronjax
from neuronjax.primitives.collectives import names
from neuronjax.sharding import make_mesh, ring_plan
from tests.hlo import Program, along
from tests.ring_case import (
    AXIS,
    DEVICES,
    FAMILIES,
    FUNCTIONS,
    RINGS,
    Call,
    Sizes,
    all_of,
    calls,
    equation,
    on_ranks,
    permutes,
    ring_mesh,
)

# The largest error of one rounding, relative to the value.
ROUNDING = dict(bfloat16=2**-8, float16=2**-11, float32=2**-24, float64=2**-53)


def _run(every, devices, given):
    return jax.jit(all_of(every, devices))(given)


def _exactly(call, operands, got):
    """Small integers: sums are exact in any order."""
    np.testing.assert_array_equal(np.asarray(got), call.wanted(operands), str(call))


@pytest.mark.parametrize("devices", DEVICES)
def test_every_macro_is_its_equation_by_one_permute_for_each_other_rank(devices):
    """R-51: `channels * (n - 1)` each, with one rank none, and no other exchange.

    A permute moves a channel's rows of one rank, float32 here. The two gathers along
    columns are one collective each.
    """
    every = calls(devices)
    given = [call.drawn(devices) for call in every]
    compiled = jax.jit(all_of(every, devices)).lower(given).compile()
    for call, operands, got in zip(every, given, compiled(given), strict=True):
        _exactly(call, operands, got)
    found, others = (
        Program(compiled.as_text() or ""),
        {"all-gather": 1, "reduce-scatter": 1},
    )
    if devices == 1:
        assert found.counts() == others
        return
    rings = [call for call in every if call.name in RINGS]
    wanted = {c.sizes.width: c.channels * (devices - 1) for c in rings}
    assert permutes(found) == wanted
    moved = others | {"collective-permute": sum(wanted.values())}
    assert found.counts(along(ring_mesh(devices), AXIS)) == found.counts() == moved
    rows = {c.sizes.width: c.sizes.rows // c.channels for c in rings}
    for each in found.collectives:
        if each.kind == "collective-permute":
            width = each.operation.types[0][1][-1]
            assert each.bytes == rows[width] * width * 4


@pytest.mark.parametrize("devices", DEVICES)
def test_the_product_comes_in_the_order_of_the_ranks(devices):
    """R-51."""
    lhs = jnp.arange(4.0 * devices).reshape(devices, 2, 2)
    rhs = jnp.stack([jnp.eye(2)] * devices)

    def run(lhs, rhs):
        ring = functools.partial(neuronjax.allgather_compute_matmul, lhs, rhs)
        return ring(devices, 1), ring(devices, 1, bidirectional=True)

    for out in jax.jit(on_ranks(ring_mesh(devices), run))(lhs, rhs):
        for own in out:
            np.testing.assert_array_equal(own, lhs.reshape(-1, 2))


def test_one_rank_needs_no_mesh():
    """R-51: with one rank it is the plain product."""
    lhs, rhs = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    got = neuronjax.allgather_compute_matmul(lhs, rhs, 1, 1)
    np.testing.assert_array_equal(got, lhs @ rhs)
    np.testing.assert_array_equal(neuronjax.matmul_reduce_scatter(lhs, rhs, 1, 1), got)
    for call in calls(1):
        operands = call.drawn(1)
        got = call.run(*(x[0] for x in operands), axis=None)
        _exactly(call, operands, got[None])


PAIRS = [
    ("float64", "float64"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float64"),
]


def test_sums_are_wide_and_rounded_once():
    """Off by one rounding of the exact result and by float32's own error, no more."""
    products = (names.MATMUL, names.MATMUL_MIRROR, names.MATMUL_WEIGHT)
    every = [
        Call(name, bool(i % 2), 1 + i % 2, dtypes=pair, sizes=Sizes(4, 7, 5))
        for i, (pair, name) in enumerate(itertools.product(PAIRS, products))
    ]
    every += [
        Call(name, dtypes=(dtype,))
        for name in (names.GATHER_MIRROR, names.COLUMNS_MIRROR)
        for dtype in ("float64", "bfloat16", "float16")
    ]
    with jax.enable_x64(True):
        given = [call.drawn(3, whole=False) for call in every]
        outs = _run(every, 3, given)
    for call, operands, got in zip(every, given, outs, strict=True):
        dtype = call.dtypes[0]
        if call.name == names.MATMUL_WEIGHT:  # of both: neither is the activation
            dtype = np.promote_types(*(jnp.dtype(x) for x in call.dtypes))
        assert got.dtype == dtype, call
        exact = call.wanted(operands)
        wide = all(x == "float64" for x in call.dtypes)
        own = 2**-48 if wide else 2**-19
        allowed = ROUNDING[str(got.dtype)] * np.abs(exact) + own * np.abs(exact).max()
        error = np.abs(np.asarray(got, np.float64) - exact)
        assert (error <= allowed).all(), (call, error.max())


def test_copies_take_any_dtype():
    ways = [(False, 1), (True, 2)]
    dtypes = ["int32", "bool", "bfloat16", "uint8", "float8_e4m3fn"]
    every = [
        Call(name, *way, dtypes=(dtype,))
        for dtype, way in itertools.product(dtypes, ways)
        for name in (names.GATHER, names.COLUMNS)
    ]
    given = [call.drawn(3) for call in every]
    for call, operands, got in zip(every, given, _run(every, 3, given), strict=True):
        assert got.dtype == operands[0].dtype
        _exactly(call, operands, got)


def test_keys_are_copied_too():
    """A copy takes any dtype: random keys, of 8 bytes each."""
    keys = jax.random.split(jax.random.key(0), (2, 3))
    assert ring_plan(keys, None, 2).buffers_bytes == 2 * 2 * 3 * 8
    got = neuronjax.fine_grained_allgather(keys, 1)
    data = jax.random.key_data
    np.testing.assert_array_equal(data(got), data(keys))


GROUPS = {
    "neighbours": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "scrambled": ((3, 0, 6, 1), (7, 2, 5, 4)),
    "across": ((0, 4), (5, 1), (6, 2), (3, 7)),
    "alone": tuple((i,) for i in range(8)),
    "one, turned": ((7, 0, 5, 2, 3, 4, 1, 6),),
}


def test_groups_exchange_among_themselves_in_their_order():
    every = [
        Call(name, bidirectional, channels, groups=GROUPS[way])
        for name in FAMILIES
        for way, bidirectional, channels in [
            ("neighbours", False, 1),
            ("scrambled", True, 2),
        ]
    ]
    every += [
        Call(name, True, groups=GROUPS[way])
        for name in (names.MATMUL, names.MATMUL_MIRROR, names.COLUMNS)
        for way in ("across", "alone", "one, turned")
    ]
    given = [call.drawn(8) for call in every]
    for call, operands, got in zip(every, given, _run(every, 8, given), strict=True):
        _exactly(call, operands, got)


ODD = [(0, 3, 2), (1, 1, 1), (5, 1, 3), (3, 5, 1), (1, 3, 1), (2, 0, 2), (2, 3, 0)]


def test_odd_and_empty_shapes():
    """No rows, none to sum over, no columns; one of each; none is a multiple."""
    every = [
        Call(name, sizes=Sizes(*sizes), bidirectional=i % 2 == 1)
        for name in FAMILIES
        for i, sizes in enumerate(ODD)
    ]
    given = [call.drawn(3) for call in every]
    for call, operands, got in zip(every, given, _run(every, 3, given), strict=True):
        assert got.shape == call.wanted(operands).shape, call
        _exactly(call, operands, got)


def test_what_is_not_finite_stays_in_its_rows():
    """NaN and infinity of one rank come out where the equation has them."""
    every = [
        Call(name, way, 1 + way, sizes=Sizes(4, 3, 3))
        for name in FAMILIES
        for way in (False, True)
        if name in RINGS or not way
    ]
    given = [call.drawn(4) for call in every]
    for own in given:
        own[0] = own[0].at[1, 0, 1].set(jnp.nan).at[2, 3, 0].set(jnp.inf)
    outs = _run(every, 4, given)
    for call, operands, got in zip(every, given, outs, strict=True):
        with np.errstate(invalid="ignore"):
            wanted = call.wanted(operands)
        np.testing.assert_array_equal(np.asarray(got), wanted, str(call))
        rows = np.isfinite(got).all(-1)
        if call.name in (names.MATMUL, names.GATHER):
            assert list(np.nonzero(~rows[0])[0]) == [1 * 4, 2 * 4 + 3]
        elif call.name in (names.MATMUL_MIRROR, names.GATHER_MIRROR):
            assert rows[1:].all() and not rows[0].all()


def _operands(name, devices, size, sizes):
    call = Call(name, groups=(tuple(range(size)),), sizes=sizes)
    return call.drawn(devices)


@pytest.mark.parametrize(("ranks", "groups"), [(4, 2), (2, 3), (1, 3), (5, 1)])
def test_functions_gather_in_neighbouring_groups(ranks, groups):
    devices, given = ranks * groups, {}
    for function, name in FUNCTIONS.items():
        given[function] = _operands(name, devices, ranks, Sizes(3, 3, 2))

    def run(given):
        return {
            (function, hbm): getattr(neuronjax, function)(
                *own, ranks, groups, hbm, bidirectional=hbm
            )
            for function, own in given.items()
            for hbm in (False, True)
        }

    neighbours = np.arange(devices).reshape(groups, ranks)
    outs = jax.jit(on_ranks(ring_mesh(devices), run))(given)
    for (function, _), got in outs.items():
        wanted = equation(FUNCTIONS[function], given[function], neighbours)
        np.testing.assert_array_equal(got, wanted, function)


# Ranks of two cores: how many channels the table of the specification gives them.
CHANNELS = {4: 2, 3: 1, 2: 1, 1: 1}


@pytest.mark.parametrize("ranks", CHANNELS)
def test_two_cores_share_the_rows_of_a_rank(ranks):
    """Joined on both cores; raw, each core's part of the kernel's own axes."""
    channels = CHANNELS[ranks]
    rows, sizes = 2, Sizes(2 * 2 * channels, 3, 2)
    given = {f: _operands(n, ranks, ranks, sizes) for f, n in FUNCTIONS.items()}
    ways = list(itertools.product((False, True), (False, True)))

    def run(given):
        return {
            (function, hbm, raw): getattr(neuronjax, function)(
                *own, ranks, 1, hbm, lnc_axis="lnc", raw=raw, bidirectional=hbm
            )
            for function, own in given.items()
            for hbm, raw in ways
        }

    mesh = make_mesh(tensor=ranks, lnc=2)
    both = jax.tree.map(lambda x: jnp.repeat(x, 2, 0), given)
    outs = jax.jit(on_ranks(mesh, run))(both)
    for (function, hbm, raw), got in outs.items():
        wanted = equation(FUNCTIONS[function], given[function])
        lead = (ranks,) if "gather" in function else ()
        view = (channels, 2, rows) if hbm else (2, channels, rows)
        if raw:
            assert got.ndim == 1 + len(lead) + 4
            axes = wanted.reshape(ranks, *lead, *view, wanted.shape[-1])
            parts = np.split(axes, 2, axis=1 + len(lead) + int(hbm))
            wanted = np.stack(parts, 1).reshape(2 * ranks, *parts[0].shape[1:])
        else:
            wanted = np.repeat(wanted, 2, 0)
        np.testing.assert_array_equal(got, wanted, f"{function} {hbm} {raw}")


def test_raw_axes_of_one_core_flatten_to_the_result():
    lhs, rhs = Call(names.MATMUL, sizes=Sizes(3, 4, 2)).drawn(2)

    def run(lhs, rhs):
        ring = functools.partial(neuronjax.allgather_compute_matmul, lhs, rhs, 2, 1)
        return ring(), ring(raw=True), ring(force_hbm_cc=True, raw=True)

    plain, *raw = jax.jit(on_ranks(ring_mesh(2), run))(lhs, rhs)
    for axes in raw:
        assert axes.shape == (2, 2, 1, 1, 3, 2)
        np.testing.assert_array_equal(axes.reshape(plain.shape), plain)


@pytest.mark.parametrize("rows", [3, 128, 256, 300])
def test_columns_are_gathered_in_the_order_of_their_group(rows):
    """One list of ranks, several, in any order; tiles shared by cores or not."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.integers(-9, 9, (4, rows, 3)), jnp.float32)
    lists = [[[0, 1, 2, 3]], [[2, 0, 3, 1]], [[3, 0], [1, 2]], [[0], [1], [2], [3]]]

    def run(x):
        outs = []
        for groups in lists:
            ranks = len(groups[0])
            outs.append(neuronjax.allgather_sb2sb(x, groups, ranks))
            tiled = functools.partial(neuronjax.allgather_sb2sb_tiled, x, groups, ranks)
            outs += [tiled(), tiled(lnc_axis="lnc")]
        return outs

    mesh = make_mesh(tensor=4, lnc=2)
    outs = jax.jit(on_ranks(mesh, run))(jnp.repeat(x, 2, 0))
    for i, got in enumerate(outs):
        wanted = np.repeat(equation(names.COLUMNS, [x], lists[i // 3]), 2, 0)
        np.testing.assert_array_equal(got, wanted)
