"""`neuronjax.verify`: who errs, where, and by how much."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax import emit
from neuronjax.tools.verify import comparison
from neuronjax.tools.verify.operands import example_of
from neuronjax.tools.verify.settings import require_known
from neuronjax.tools.verify.verification import verify_example
from tests.emitter_calls import CALLS


def normal(*shape, dtype="float32", seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def norm_equation(x, scale, eps=1e-6):
    """Zhang and Sennrich 2019, equation 4."""
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def test_a_public_function_is_compared_with_its_plain_form():
    report = neuronjax.verify(neuronjax.rms_norm, normal(3, 256), jnp.ones(256))
    assert report and report.failed == ()
    (out,) = report.outputs
    assert out.dtype == np.float32 and out.exact_dtype == np.float64
    assert 0 < out.absolute <= out.allowed < 1e-5
    assert sum(out.ulps.values()) == 3 * 256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("against", [neuronjax.rms_norm, "NeuronReduceMacro"])
def test_a_function_of_a_users_own_is_compared_with_a_macro(dtype, against):
    x, scale = normal(5, 96, dtype=dtype), normal(96, dtype=dtype, seed=1)
    config = dict(eps=1e-3)
    operands: tuple = (x, scale)
    if isinstance(against, str):
        config |= dict(neuronjax.trace(neuronjax.rms_norm, x, scale).rows[0].config)
        operands += (None,)

    def mine(x, scale, bias=None, *, eps):
        wide = norm_equation(x.astype(jnp.float32), scale.astype(jnp.float32), eps)
        return wide.astype(x.dtype)

    def wrong(x, scale, bias=None, *, eps):
        return mine(x, scale, bias, eps=eps) * jnp.asarray(3 / 4, x.dtype)

    config["eps"] = 1e-3
    assert neuronjax.verify(mine, *operands, against=against, **config)
    report = neuronjax.verify(wrong, *operands, against=against, **config)
    assert not report and "out" in report.verdict
    assert report.outputs[0].relative == pytest.approx(1 / 4, abs=2**-6)


def test_the_worst_element_is_named_with_its_tile():
    """Axis 0 of 256 rows: row n lies on partition n // 2, in chunk n % 2."""

    def wrong(x, scale):
        return norm_equation(x, scale).at[77, 5].add(0.5)

    x = normal(256, 24)
    check = functools.partial(
        neuronjax.verify, wrong, x, jnp.ones(24), against=neuronjax.rms_norm
    )
    worst = check(partition_axis=0).outputs[0].worst
    row = np.float64(x[77])
    exact = row[5] / np.sqrt(np.mean(row**2) + 1e-6)
    assert worst.index == (77, 5) and worst.tile == (38, 1)
    assert worst.exact == pytest.approx(exact, rel=1e-12)
    assert worst.got == pytest.approx(exact + 0.5)
    assert worst.plain == pytest.approx(exact)
    assert worst.absolute == pytest.approx(0.5)
    assert worst.relative == pytest.approx(0.5 / abs(exact))
    assert worst.ulps > 1000
    assert check().outputs[0].worst.tile == (5, 0)
    assert "38, 1" in str(check(partition_axis=0))


def test_an_axis_that_fills_no_partitions_has_no_tile():
    report = neuronjax.verify(neuronjax.rms_norm, normal(2, 200), jnp.ones(200))
    assert report and report.outputs[0].worst.tile is None


def test_tiles_in_tiles_out():
    def tile(x, axis):
        return neuronjax.MemrefTile.from_tensor(x, axis)

    operands = tile(normal(1, 2, 256), 2), None, tile(normal(256, 4, seed=1), 0)
    operands += (tile(normal(4, 256, seed=2), 0),)
    report = neuronjax.verify(emit.mlp_kernel, *operands, skip_gate=True)
    assert report
    (out,) = report.outputs
    partition, chunk, *_ = out.worst.index
    assert out.shape == (128, 2, 1, 2) and out.worst.tile == (partition, chunk)


def test_ulps_count_the_numbers_between():
    """From NumPy's own step, and across zero."""
    for dtype in (np.float32, np.float64, np.float16):
        one = np.ones(1, dtype)
        beyond = one
        for steps in range(4):
            assert comparison.ulps(beyond, one)[0] == steps
            beyond = np.nextafter(beyond, np.full(1, 2, dtype))
        tiny = np.nextafter(np.zeros(1, dtype), one)
        assert comparison.ulps(tiny, -tiny)[0] == 2
        assert comparison.ulps(-np.zeros(1, dtype), np.zeros(1, dtype))[0] == 0
        nan = np.full(1, np.nan, dtype)
        assert comparison.ulps(nan, nan)[0] == 0
        assert comparison.ulps(nan, one)[0] > 1024


def test_ulps_of_narrow_floats():
    for dtype in (jnp.bfloat16, jnp.float8_e4m3, jnp.float8_e4m3fn):
        step = float(jnp.finfo(dtype).eps)
        pair = (np.array([x]).astype(dtype) for x in (1 + 3 * step, 1.0))
        assert comparison.ulps(*pair)[0] == 3


def test_the_histogram_has_every_element_in_one_column():
    distance = np.array([0, 0, 1, 2, 3, 4, 5, 16, 17, 64, 65, 1024, 1025, 2**63])
    found = comparison.histogram(distance.astype(np.uint64))
    assert list(found.values()) == [2, 1, 1, 2, 2, 2, 2, 2]
    assert list(found) == ["0", "1", "2", "3-4", "5-16", "17-64", "65-1024", ">1024"]


def test_a_nan_where_the_reference_is_finite_fails():
    def wrong(x, scale):
        return norm_equation(x, scale).at[1, 2].set(jnp.nan)

    operands = normal(4, 8), jnp.ones(8)
    report = neuronjax.verify(wrong, *operands, against=neuronjax.rms_norm)
    assert not report
    assert report.outputs[0].misplaced == 1 and report.outputs[0].worst.index == (1, 2)


def test_what_overflows_the_dtype_is_no_error():
    """70000 is infinite in float16, in the function as in the rounded reference."""
    x = jnp.array([200.0, 350.0], jnp.float16)

    def mine(x):
        return x * x

    report = neuronjax.verify(mine, x, against=lambda x: x**2)
    assert report and report.outputs[0].misplaced == 0


def test_integers_are_counted():
    x = normal(4, 16)

    def wrong(x, k):
        value, index = jax.lax.top_k(x, k)
        return value, jnp.minimum(index, 9)

    assert neuronjax.verify(neuronjax.topk, x, 3, against=jax.lax.top_k)
    report = neuronjax.verify(wrong, x, 3, against=jax.lax.top_k)
    values, index = report.outputs
    assert values and not index
    assert index.misplaced == int(np.sum(np.asarray(jax.lax.top_k(x, 3)[1]) > 9)) > 0


def test_fewer_outputs_than_a_macro_has_are_compared_and_told():
    x, scale = normal(3, 8), jnp.ones(8)
    report = neuronjax.verify(
        lambda x, scale, bias: norm_equation(x, scale, 0.0),
        *(x, scale, None),
        against="NeuronReduceMacro",
        **dict(neuronjax.trace(neuronjax.rms_norm, x, scale).rows[0].config, eps=0.0),
    )
    assert report and [out.name for out in report.outputs] == ["out"]
    assert "rstd" in report.notes[0]


def test_pytrees_and_absent_operands_go_through():
    def mine(tree, absent):
        assert absent is None
        return {"sum": tree["a"] + tree["b"], "kept": tree["a"]}

    def theirs(tree, absent):
        return {"sum": tree["b"] + tree["a"], "kept": tree["a"]}

    tree = {"a": normal(4), "b": np.ones(4, np.float32)}
    report = neuronjax.verify(mine, tree, None, against=theirs)
    assert report and [out.name for out in report.outputs] == ["kept", "sum"]
    assert report.outputs[0].worst is None and "none errs" in str(report)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: neuronjax.verify(jnp.sin, x), "holds no macro"),
        (lambda x: neuronjax.verify(jnp.sin, x, against=lambda x: x[0]), "same shape"),
        (lambda x: neuronjax.verify(jnp.sin, x, against=jnp.argsort), "same shape"),
        (lambda x: neuronjax.verify(jnp.sin, x, against=lambda x: (x, x)), "outputs"),
        (lambda x: neuronjax.verify(jnp.sin, x, against="RoPEX"), "near matches: RoPE"),
        (lambda x: neuronjax.verify(jnp.sin, x, against="RoPE"), "settings such as"),
        (lambda x: neuronjax.verify("RoPEBwd", x), "settings such as"),
        (
            lambda x: neuronjax.verify(neuronjax.rms_norm, x, x[0], esp=1.0),
            "rms_norm has no setting esp",
        ),
        (
            lambda x: neuronjax.verify(jnp.fft.fft, x, against=jnp.fft.fft),
            "real and imaginary",
        ),
    ],
)
def test_a_mistake_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(normal(4, 8))


def test_it_is_called_outside_jit_and_plain():
    check = functools.partial(neuronjax.verify, jnp.sin, against=jnp.sin)
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(check)(normal(4))
    with neuronjax.plain(), pytest.raises(ValueError, match="plain"):
        check(normal(4))


def test_a_reference_that_casts_is_told():
    def casts(x):
        return jnp.sin(x.astype(jnp.float32))

    report = neuronjax.verify(jnp.sin, normal(4), against=casts)
    assert report and "float32" in report.notes[0]


def test_float64_operands_stay_float64():
    with jax.enable_x64(True):
        x = normal(4, 8, dtype="float64")
        report = neuronjax.verify(neuronjax.rms_norm, x, jnp.ones(8, x.dtype))
    assert report and report.outputs[0].dtype == np.float64
    assert report.outputs[0].absolute < 1e-14


NAMES = ("CumSum", "MLP", "RoPEBwd", "RouterTopK", "CollectiveMatmul")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_name_runs_on_its_example(name, dtype):
    report = verify_example(name, dtype=dtype)
    assert report and report.function == name


def test_a_name_alone_and_a_wrong_rival():
    assert neuronjax.verify("CumSum")

    def rival(x):
        return jnp.cumsum(x, -1) + 1

    assert not neuronjax.verify("CumSum", against=rival)


def test_a_registered_kernel_of_a_users_own_is_a_name_like_others():
    def decay(x, rate, *, power=2):
        return x * jnp.exp(-rate * jnp.asarray(power, rate.dtype))

    def operands(dtype, batch):
        return normal(batch, 3, dtype=dtype), normal(3, dtype=dtype, seed=1)

    emitter = neuronjax.register_kernel("VerifiedDecay", decay, example=operands)
    x, rate = operands("float32", 4)
    assert neuronjax.verify("VerifiedDecay")
    assert neuronjax.verify(emitter, x, rate, power=3)

    def mine(x, rate, power):
        return x / jnp.exp(rate) ** power

    def check(power):
        report = neuronjax.verify(
            lambda x, rate: mine(x, rate, power),
            x,
            rate,
            against="VerifiedDecay",
            power=3,
        )
        return bool(report)

    assert check(3) and not check(2)


def test_an_unknown_setting_of_a_name_is_one_clear_error():
    """A user's kernel names its settings; macros of the catalog carry hints too."""

    def power(x, *, power=2):
        return x**power

    def operands(dtype, batch):
        return (normal(batch, 3, dtype=dtype),)

    neuronjax.register_kernel("VerifiedPower", power, example=operands)
    neuronjax.register_kernel("VerifiedAlone", power)
    for args in ((), (normal(2),)):
        with pytest.raises(ValueError, match="1 operand .* power=2: .*bogus"):
            neuronjax.verify("VerifiedPower", *args, bogus=1)
    with pytest.raises(ValueError, match="VerifiedAlone: .*bogus"):
        neuronjax.verify("VerifiedAlone", normal(2), bogus=1)
    with pytest.raises(ValueError, match="has no example"):
        neuronjax.verify("VerifiedAlone")
    assert neuronjax.verify("VerifiedPower", power=3).notes == ()
    assert neuronjax.verify("CumSum", num_tiles=1).notes == ()
    with pytest.raises(ValueError, match="CumSum has neither .* hint 'bogus'; hints"):
        neuronjax.verify("CumSum", bogus=1)
    for args in ((), tuple(normal(4, 4) for _ in range(4))):
        with pytest.raises(ValueError, match="MLP has .* 'activaton'; .*: activation"):
            neuronjax.verify("MLP", *args, activaton="SiLU")
    with pytest.raises(ValueError, match="CumSum has neither .* 'bogus'"):
        neuronjax.verify(jnp.cumsum, normal(4), against="CumSum", bogus=1)


@pytest.mark.parametrize("label", CALLS)
def test_every_setting_that_an_emitter_writes_is_known(label):
    call = CALLS[label]
    rows = neuronjax.trace(call.fun, *call.arrays).rows
    for row in rows:
        require_known(row.name, dict(row.config))
    assert rows


def test_an_example_without_random_numbers_has_no_other_seed():
    def operands(dtype, batch):
        return (jnp.ones((batch, 3), dtype),)

    neuronjax.register_kernel("VerifiedOnes", lambda x: x + x, example=operands)
    assert verify_example("VerifiedOnes")
    with pytest.raises(ValueError, match="expected seed 0, got 1"):
        verify_example("VerifiedOnes", seed=1)


def test_seeds_draw_other_numbers_by_the_same_recipe():
    family = neuronjax.primitives.registry.family_of("MLP")
    first, again, other = (
        example_of(family, "MLP", "float32", 3, s) for s in (0, 0, 1)
    )
    assert first.config == other.config
    shapes = [[x.shape for x in jax.tree.leaves(e.operands)] for e in (first, other)]
    assert shapes[0] == shapes[1] and shapes[0][0][0] == 3
    leaves = (jax.tree.leaves(e.operands) for e in (first, again, other))
    for a, b, c in zip(*leaves, strict=True):
        assert (a == b).all() and not (a == c).all()
    assert verify_example("MLP", seed=5)
