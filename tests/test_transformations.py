"""The transformation table: every macro NAME x every transformation.

A macro joins it by registering; a refusal is declared with its family. Each cell
compares the macro with its plain reference under the same transformation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import neuronjax
from neuronjax.kernels.dtypes import accumulator
from neuronjax.tools import tables
from tests.macro_case import (
    NAMES,
    MacroCase,
    assert_close,
    error,
    grads,
    is_float,
    loss,
)

CELLS = {}
GRADIENT = 1e-4


def cell(name):
    def enter(check):
        CELLS[name] = check
        return check

    return enter


@cell("jit")
def _(case):
    assert_close(jax.jit(case.macro)(*case.flat), case.wanted[0])
    assert_close(case.macro(*case.flat), case.wanted[0])


@cell("plain()")
def _(case):
    with neuronjax.plain():
        assert case.equations(case.macro, *case.flat) == 0
        assert_close(jax.jit(case.macro)(*case.flat), case.wanted[0])


@cell("grad")
def _(case):
    got = grads(case.of_floats(case.macro), len(case.floats))(*case.live)
    assert_close(got, case.wanted[1], GRADIENT)


@cell("jvp")
def _(case):
    dots = [jnp.cos(x) for x in case.live]
    got, wanted = (
        jax.jit(functools.partial(jax.jvp, case.of_floats(f)))(case.live, dots)
        for f in (case.macro, case.plain)
    )
    assert_close(got, wanted, GRADIENT)


@cell("hvp")
def _(case):
    dots = [jnp.cos(x) for x in case.live]
    got, wanted = (
        jax.jit(lambda a, t, f=f: jax.jvp(grads(case.of_floats(f), len(a)), a, t)[1])(
            tuple(case.live), tuple(dots)
        )
        for f in (case.macro, case.plain)
    )
    assert_close(got, wanted, 5e-4)


@cell("grad of grad")
def _(case):
    def twice(f):
        first = grads(case.of_floats(f), len(case.floats))
        return jax.grad(
            lambda *a: sum(jnp.vdot(jnp.cos(x), x) for x in first(*a)),
            tuple(range(len(case.floats))),
        )

    got, wanted = (jax.jit(twice(f))(*case.live) for f in (case.macro, case.plain))
    assert_close(got, wanted, 5e-4)


def _stack(x, size, axis=0):
    if not is_float(x):
        return jnp.stack([x] * size, axis)
    return jnp.stack([x * (1 + i / 4) for i in range(size)], axis).astype(x.dtype)


def _vmap(case, first, rest, size=3):
    """vmap equals a Python loop, and the mapped macro is one macro."""
    alone = len(case.flat) == 1 and first is None
    dims = [rest if alone else first] + [rest] * (len(case.flat) - 1)

    def each(act):
        pairs = zip(case.flat, dims, strict=True)
        return [x if dim is None else act(x, dim) for x, dim in pairs]

    stacked = each(lambda x, dim: _stack(x, size, dim))
    batched = jax.vmap(case.macro, dims)
    outs = [
        case.reference(*each(lambda x, _, i=i: _stack(x, size)[i])) for i in range(size)
    ]
    wanted = [jnp.stack(column) for column in zip(*outs, strict=True)]
    assert_close(list(jax.jit(batched)(*stacked)), wanted)
    assert case.equations(batched, *stacked) == 1


cell("vmap (0, 0, ..)")(lambda case: _vmap(case, 0, 0))
cell("vmap (0, None, ..)")(lambda case: _vmap(case, 0, None))
cell("vmap (None, 0, ..)")(lambda case: _vmap(case, None, 0))
cell("vmap (1, 0, ..)")(lambda case: _vmap(case, 1, 0))
cell("vmap of size 1")(lambda case: _vmap(case, 0, None, size=1))


@cell("vmap of vmap")
def _(case):
    others = len(case.flat) - 1
    operands = [_stack(x, 2) for x in case.flat]
    outer = [None] + [0] * others
    if not others:
        operands, outer = [_stack(x, 3) for x in operands], [0]

    def twice(fun):
        return jax.vmap(jax.vmap(fun, [0] + [None] * others), outer)

    got, wanted = twice(case.macro), twice(case.plain)
    assert case.equations(got, *operands) == 1
    assert_close(jax.jit(got)(*operands), jax.jit(wanted)(*operands))


@cell("vmap of grad")
def _(case):
    stacked = [_stack(case.live[0], 3), *case.live[1:]]
    dims = [0] + [None] * (len(case.live) - 1)
    got, wanted = (
        jax.jit(jax.vmap(grads(case.of_floats(f), len(case.live)), dims))(*stacked)
        for f in (case.macro, case.plain)
    )
    assert_close(got, wanted, GRADIENT)


@cell("grad of vmap")
def _(case):
    stacked = [_stack(case.live[0], 3), *case.live[1:]]
    dims = [0] + [None] * (len(case.live) - 1)
    got, wanted = (
        jax.jit(grads(jax.vmap(case.of_floats(f), dims), len(case.live)))(*stacked)
        for f in (case.macro, case.plain)
    )
    assert_close(got, wanted, GRADIENT)


@cell("scan")
def _(case):
    def steps(f):
        def run(*floats):
            def body(total, factor):
                moved = [x * factor.astype(x.dtype) for x in floats]
                return total + loss(case.of_floats(f))(*moved), factor

            return lax.scan(body, 0.0, jnp.array([1.0, 0.5]))[0]

        if case.family.no_derivative is not None:
            return run
        return jax.value_and_grad(run, tuple(range(len(case.live))))

    got, wanted = (jax.jit(steps(f))(*case.live) for f in (case.macro, case.plain))
    assert_close(got, wanted, GRADIENT)


@cell("remat")
def _(case):
    config = case.family.differentiated(case.config)
    names = case.family.output_names(config)
    saved = jax.checkpoint_policies.save_only_these_names(*names)
    most = {saved: 1, jax.checkpoint_policies.nothing_saveable: 2}
    for policy, limit in most.items():
        kept = jax.checkpoint(case.of_floats(case.macro), policy=policy)
        got = grads(kept, len(case.live))
        times = case.equations(got, *case.live)
        assert times == limit or (times < limit and case.family.backward is None)
        assert_close(got(*case.live), case.wanted[1], GRADIENT)


def _spec(axis):
    return P() if axis is None else P(*[None] * axis, "data")


def _sharded(case, devices):
    """The macro under shard_map: outputs that no axis splits are summed."""
    mesh = jax.make_mesh(
        (devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]
    )

    def local(*flat):
        outs = case.macro(*flat)
        return tuple(
            lax.psum(out, "data") if axis is None else out
            for out, axis in zip(outs, case.out_split, strict=True)
        )

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(map(_spec, case.split)),
        out_specs=tuple(map(_spec, case.out_split)),
    )


def _shard_map(name, devices):
    case = MacroCase(name, batch=2 * devices, ranks=devices)
    call = _sharded(case, devices) if case.axis is None else case.macro
    outs, got = case.both(call, *case.flat)
    assert_close(outs, case.wanted[0])
    assert_close(got, case.wanted[1], GRADIENT)


for _devices in (1, 2, 3, 5, 8):
    cell(f"shard_map over {_devices}")(
        lambda case, devices=_devices: _shard_map(case.label, devices)
    )


@cell("explicit sharding")
def _(case):
    mesh = jax.make_mesh(
        (2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2]
    )
    with jax.set_mesh(mesh):
        if case.axis is not None:
            case = MacroCase(case.label, kind=AxisType.Explicit)
        flat = [
            jax.device_put(x, NamedSharding(mesh, _spec(axis)))
            for x, axis in zip(case.flat, case.split, strict=True)
        ]
        outs, got = case.both(case.macro, *flat)
    for out, axis in zip(outs, case.out_split, strict=True):
        if axis is not None:
            assert jax.typeof(out).sharding.spec[axis] == "data"
    assert_close(jax.device_get(outs), jax.device_get(case.wanted[0]))
    assert_close(jax.device_get(got), jax.device_get(case.wanted[1]), GRADIENT)


def _round_trip(fun, args, **kwargs):
    exported = export.export(jax.jit(fun), **kwargs)(*args)
    again = export.deserialize(exported.serialize())
    return again, again.call


def _exported(case, **kwargs):
    """The module's text; outputs and gradients of the reloaded program."""
    saved, call = _round_trip(lambda *a: case.both(case.macro, *a), case.flat, **kwargs)
    outs, got = call(*case.flat)
    assert_close(outs, case.wanted[0])
    assert_close(got, case.wanted[1], GRADIENT)
    return saved.mlir_module()


@cell("export inline")
def _(case):
    assert case.name in _exported(case, platforms=["cpu", "tpu", "cuda"])


@cell("export composite")
def _(case):
    with neuronjax.lowering("composite"):
        assert f"neuron.{case.name}" in _exported(case)


@cell("export, symbolic batch")
def _(case):
    (batch,) = export.symbolic_shape("b")
    shapes = [
        jax.ShapeDtypeStruct(
            # The case has batch 2: grouped heads split in multiples of it.
            tuple(n // 2 * batch if i == axis else n for i, n in enumerate(x.shape)),
            x.dtype,
        )
        for x, axis in zip(case.flat, case.grows, strict=True)
    ]
    saved = export.export(jax.jit(case.macro))(*shapes)
    call = export.deserialize(saved.serialize()).call
    for size in (2, 3):
        again = MacroCase(case.label, batch=size)
        assert_close(tuple(call(*again.flat)), again.reference(*again.flat))


@cell("bfloat16")
def _(case):
    """The macro errs at most twice as much as the plain bfloat16 computation."""
    low = MacroCase(case.label, "bfloat16")
    got, plain = low.both(low.macro, *low.flat), low.wanted
    assert [x.dtype for x in got[0]] == [x.dtype for x in plain[0]]
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) if is_float(x) else x for x in low.flat]
        exact = low.both(low.plain, *wide)
    for a, b, c in zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True):
        assert error(a, c) <= 2 * error(b, c) + 2**-8


@cell("x64")
def _(case):
    with jax.enable_x64(True):
        case = MacroCase(case.label, "float64")
        (outs, got), (exact, gradient) = case.both(case.macro, *case.flat), case.wanted
        assert_close(outs, exact, 1e-11)
        assert_close(got, gradient, 1e-10)
        # Scales are constants and roundings pass straight through: a numeric derivative
        # sees neither.
        fp8 = case.config.get("is_fp8_kernel", False)
        blocks = case.config.get("quantization") == "MX"
        if case.family.no_derivative is None and not (fp8 or blocks):
            fun = jax.jit(loss(case.of_floats(case.macro)))
            check_grads(fun, case.live, 1, eps=1e-5)


@cell("donation")
def _(case):
    wanted = case.wanted[0]
    copies = [jnp.copy(x) for x in case.flat]
    donating = jax.jit(case.macro, donate_argnums=tuple(range(len(copies))))
    assert_close(donating(*copies), wanted)
    assert not any(x.is_deleted() for x in case.flat)


def test_the_table_on_the_docs_page_has_these_columns():
    assert tuple(CELLS) == tables.TRANSFORMATIONS


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("transformation", CELLS)
@pytest.mark.parametrize("name", NAMES)
def test_transformation(name, transformation):
    case = MacroCase(name)
    reason = case.family.refuses.get(transformation)
    if reason is None:
        CELLS[transformation](case)
    else:
        with pytest.raises((NotImplementedError, ValueError, TypeError)):
            CELLS[transformation](case)


def test_a_foreign_name_is_refused_in_the_contract_words():
    for name in NAMES:
        case = MacroCase(name)
        expected = " or ".join(case.family.guard)
        message = f"Expected to get an {expected} but got Nonsense"
        with pytest.raises(ValueError, match=message):
            case.family(*case.flat, name="Nonsense")
        with pytest.raises(ValueError, match=message):
            case.family.macro_p.bind(
                *case.flat, name="Nonsense", config=(), tree=case.tree, axes=()
            )


def test_integer_operands_get_float0_tangents():
    """R-45."""
    for name in NAMES:
        case = MacroCase(name)
        if case.family.no_derivative is not None:
            continue
        _, pull = jax.vjp(case.macro, *case.flat)
        outs = case.macro(*case.flat)
        seeds = tuple(
            np.zeros(o.shape, jax.dtypes.float0)
            if jnp.issubdtype(o.dtype, jnp.integer)
            else jnp.ones_like(o)
            for o in outs
        )
        for x, cotangent in zip(case.flat, pull(seeds), strict=True):
            integer = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
            assert (cotangent.dtype == jax.dtypes.float0) == integer
            assert is_float(x) or integer or not np.any(np.float32(cotangent))


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_gives_the_same_structure(name):
    """R-47: abstract evaluation, forward, forward rule and reference agree."""
    case = MacroCase(name)

    def structure(outs):
        return [(x.shape, x.dtype) for x in outs]

    wanted = structure(case.wanted[0])
    assert structure(jax.eval_shape(case.macro, *case.flat)) == wanted
    assert structure(case.macro(*case.flat)) == wanted
    assert len(case.family.output_names(case.config)) == len(wanted)
    if case.family.no_derivative is not None:
        return
    dots = [jnp.ones_like(x) for x in case.live]
    outs, moved = jax.jvp(case.of_floats(case.macro), case.live, dots)
    assert structure(outs) == wanted
    assert [x.shape for x in moved] == [shape for shape, _ in wanted]


@pytest.mark.parametrize("name", NAMES)
def test_jacobians_equal_those_of_the_plain_computation(name):
    """R-42: `jax.jacrev` maps the backward macro over cotangents alone."""
    case = MacroCase(name)
    if case.family.no_derivative is not None:
        pytest.skip(case.family.no_derivative)

    def sums(fun):
        def few(*floats):
            wide = [x for x in case.of_floats(fun)(*floats) if is_float(x)]
            first = wide[0].ravel()[:3]
            return jnp.sin(first.astype(accumulator(first.dtype)))

        return jax.jit(jax.jacrev(few, tuple(range(len(case.live)))))

    got, wanted = (sums(f)(*case.live) for f in (case.macro, case.plain))
    assert_close(got, wanted, GRADIENT)
