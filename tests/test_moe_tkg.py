"""A decode step's experts against the equations in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import neuronjax
from neuronjax import moe_tkg
from tests.moe_decode_case import (
    ALL,
    FLOATS,
    FORMS,
    LIMITS,
    Decode,
    call,
    close,
    gradients,
    plain,
    run,
    without,
)


@pytest.mark.parametrize(
    ("form", "scaling", "activation"),
    [
        ("selective", "POST_SCALE", "SiLU"),
        ("selective", "POST_SCALE", "GELU"),
        ("selective", "NO_SCALE", "Swish"),
        ("selective, of a rank", "POST_SCALE", "GELU_Tanh_Approx"),
        ("selective, of a rank", "NO_SCALE", "SiLU"),
        ("all", "POST_SCALE", "Swish"),
        ("all", "NO_SCALE", "GELU"),
        ("all, masked", "POST_SCALE", "SiLU"),
        ("all, dynamic", "POST_SCALE", "GELU_Tanh_Approx"),
        ("all, dynamic", "NO_SCALE", "SiLU"),
    ],
)
def test_values_and_gradients_are_those_of_the_equations(form, scaling, activation):
    given = call(
        **dict(
            FORMS[form],
            expert_affinities_scaling_mode=scaling,
            activation_fn=activation,
        )
    )
    wanted, seed = Decode(given), np.random.default_rng(1).normal(size=(5, 8))
    close(jax.jit(lambda live: run(given, **live))({}), wanted.out())
    found = gradients(given, jnp.asarray(seed, jnp.float32))
    for key, grad in wanted.grads(seed).items():
        close(found[key], grad, 1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(tokens=1, k=1),
        dict(tokens=1, k=4, width=3, d_ff=5),
        dict(tokens=129, k=3, local=7, experts=7),
        dict(tokens=3, k=5, local=2, experts=2),
        dict(tokens=40, local=1, experts=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("bare", [False, True])
def test_any_sizes(sizes, bare):
    given = call(**sizes)
    if bare:
        given = without(given, *LIMITS, "expert_gate_up_bias", "expert_down_bias")
    close(run(given), Decode(given).out())
    given |= dict(is_all_expert=True, rank_id=0)
    close(run(given), Decode(given).out())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["selective", "all, masked"])
def test_narrow_floats_err_at_most_twice_as_much_as_a_plain_computation(form, dtype):
    given = call(tokens=12, width=32, d_ff=24, **FORMS[form])
    narrow = {key: given[key].astype(dtype) for key in FLOATS}
    given |= narrow
    exact, seed = Decode(given), np.random.default_rng(2).normal(size=(12, 32))
    out, grads = run(given), gradients(given, jnp.asarray(seed, dtype))
    assert out.dtype == dtype
    assert {x.dtype for x in grads.values()} == {jnp.dtype(dtype)}
    simple, pull = jax.vjp(lambda live: plain(given | live), narrow)
    (simple_grads,) = pull(jnp.asarray(seed, dtype))
    seed = np.asarray(jnp.asarray(seed, dtype), np.float64)
    step = float(jnp.finfo(dtype).eps)
    wanted = exact.grads(seed) | dict(out=exact.out())
    for key, value in wanted.items():
        ours, theirs = (
            np.asarray(x[key], np.float64)
            for x in (dict(grads, out=out), dict(simple_grads, out=simple))
        )
        error, allowed = np.abs(ours - value).max(), np.abs(theirs - value).max()
        assert error <= 2 * allowed + step * np.abs(value).max(), key


def test_a_wider_result_is_not_rounded_in_between():
    given = call()
    given |= {key: given[key].astype(jnp.bfloat16) for key in FLOATS}
    wide = run(given, output_dtype="float32")
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), run(given))
    assert (wide != run(given).astype(jnp.float32)).any()


def test_derivatives():
    with jax.enable_x64(True):
        given = call(tokens=3, width=3, d_ff=2)
        given |= {key: given[key].astype(jnp.float64) for key in FLOATS}
        live = {key: given[key] for key in FLOATS}
        fun = jax.jit(lambda live: jnp.sin(run(given, **live)))
        check_grads(fun, (live,), 1, modes=("fwd", "rev"), eps=1e-5)


def test_forward_derivatives_know_tokens_of_affinity_zero():
    """Dynamic loops leave those tokens out, and a derivative does not."""
    given = call(tokens=3, width=2, d_ff=2, **FORMS["all, dynamic"])
    table = given["expert_affinities"].at[::2].set(0)
    still = given | dict(is_all_expert_dynamic=False, block_size=None)
    for way in (jax.jacfwd, jax.jacrev):
        found, wanted = (
            way(lambda a, case=case: run(case, expert_affinities=a))(table)
            for case in (given, still)
        )
        close(found, wanted)


def test_a_wide_index_does_not_wrap_around():
    given = call(tokens=3)
    far = np.asarray(given["expert_index"], np.int64)
    far[0] += 2**32
    close(run(given, expert_index=far), Decode(given | dict(expert_index=far)).out())
    assert not run(given, expert_index=far)[0].any()


def test_an_expert_named_twice_counts_twice_and_one_outside_not_at_all():
    given = call(tokens=3)
    index = jnp.array([[1, 1], [0, 4], [-1, 2**31 - 1]], jnp.int32)
    given |= dict(expert_index=index)
    out = run(given)
    close(out, Decode(given).out())
    once = run(given, expert_index=index[:, :1])
    np.testing.assert_allclose(out[0], 2 * once[0], rtol=1e-6)
    np.testing.assert_allclose(out[1], once[1], rtol=1e-6)
    np.testing.assert_array_equal(out[2], np.zeros(8))
    grads = gradients(given, jnp.ones((3, 8)))
    np.testing.assert_array_equal(grads["hidden_input"][2], np.zeros(8))
    np.testing.assert_array_equal(grads["expert_affinities"][2], np.zeros(4))


@pytest.mark.parametrize("dtype", ["uint32", "int8", "int64", "uint8"])
def test_indices_of_any_integer_dtype(dtype):
    with jax.enable_x64(dtype == "int64"):
        given = call()
        index = np.asarray(given["expert_index"])
        got = run(given, expert_index=jnp.asarray(index, dtype))
        np.testing.assert_array_equal(got, run(given))


def test_the_gradient_of_an_affinity_is_what_the_expert_gives():
    """R-39: also where the affinity is 0, or negative; dynamic skipping included."""
    w = jnp.ones((2, 1, 2, 1))
    opened = float(jax.nn.silu(1.0))
    down = jnp.array([2.0, 5.0]).reshape(2, 1, 1) / opened
    index = jnp.array([[0, 1]], jnp.int32)
    for gates in ([0.4, 0.3], [0.0, 0.3], [-0.5, 0.0]):
        for options in (
            dict(is_all_expert=False),
            dict(is_all_expert=True, rank_id=0),
            dict(
                is_all_expert=True, rank_id=0, is_all_expert_dynamic=True, block_size=1
            ),
        ):

            def out(a, options=options):
                scaled = dict(expert_affinities_scaling_mode="POST_SCALE")
                return moe_tkg(jnp.ones((1, 1)), w, down, a, index, **options, **scaled)

            table = jnp.array([gates])
            value, pull = jax.vjp(out, table)
            np.testing.assert_allclose(value[0], table @ jnp.array([2.0, 5.0]), 1e-6)
            np.testing.assert_allclose(pull(jnp.ones((1, 1)))[0], [[2, 5]], 1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_experts_that_no_token_names_are_not_read(poison):
    """R-37: they get a gradient of exactly zero, whatever they hold."""
    given = call()
    index = jnp.where(given["expert_index"] == 2, 3, given["expert_index"])
    given |= dict(expert_index=index)
    clean, grads = run(given), gradients(given, jnp.ones((5, 8)))
    weights = [key for key in FLOATS if key.startswith("expert_") and "aff" not in key]
    given |= {key: given[key].at[2].set(poison) for key in weights}
    given["expert_affinities"] = given["expert_affinities"].at[:, 2].set(poison)
    np.testing.assert_array_equal(run(given), clean)
    found = gradients(given, jnp.ones((5, 8)))
    for key in FLOATS:
        np.testing.assert_array_equal(found[key], grads[key])
    for key in weights:
        np.testing.assert_array_equal(found[key][2], np.zeros_like(found[key][2]))


def test_all_tokens_may_name_one_expert():
    given = call(tokens=33) | dict(expert_index=jnp.full((33, 2), 3, jnp.int32))
    close(run(given), Decode(given).out())


def test_a_rank_may_be_traced_and_one_beyond_the_experts_has_affinity_zero():
    given = call(**FORMS["all, masked"])
    ranks = jnp.arange(4, dtype=jnp.int32)
    each = jax.jit(jax.vmap(lambda r: run(given, rank_id=r.reshape(1, 1))))(ranks)
    for rank in range(3):
        close(each[rank], Decode(given | dict(rank_id=rank)).out())
    np.testing.assert_array_equal(each[3], np.zeros((5, 8)))
    with pytest.raises(
        ValueError, match="the local experts of rank_id, 4 from 4 \\* 3"
    ):
        run(given, rank_id=3)


def test_ranks_over_a_mesh_sum_to_all_experts():
    """Expert parallelism: each device holds its experts, and one sum is exchanged."""
    whole = call(experts=8, local=8, is_all_expert=True, rank_id=0)
    mesh = jax.make_mesh(
        (4,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]
    )
    experts = [key for key in FLOATS if key.startswith("expert_") and "aff" not in key]
    spec = jax.P("expert")

    def local(parts, live):
        rank = jax.lax.axis_index("expert").astype(jnp.int32).reshape(1, 1)
        out = run(whole | parts | live, rank_id=rank)
        return jax.lax.psum(out, "expert")

    run_all = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=({key: spec for key in experts}, jax.P()),
            out_specs=jax.P(),
        )
    )
    parts = {key: whole[key] for key in experts}
    live = {key: whole[key] for key in ("hidden_input", "expert_affinities")}
    close(run_all(parts, live), Decode(whole).out())
    seed = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32)
    wanted = Decode(whole).grads(np.asarray(seed, np.float64))
    found = jax.vjp(run_all, parts, live)[1](seed)
    for key, grad in {**found[0], **found[1]}.items():
        close(grad, wanted[key], 1e-4)


def test_skipping_tokens_changes_nothing():
    given = call(tokens=9, **FORMS["all, dynamic"])
    table = given["expert_affinities"]
    given["expert_affinities"] = jnp.where(jnp.abs(table) < 0.4, 0, table)
    close(run(given), Decode(given).out())
    every = without(given, "is_all_expert_dynamic", "block_size")
    seed = jnp.ones((9, 8))
    for key, grad in gradients(given, seed).items():
        np.testing.assert_allclose(grad, gradients(every, seed)[key], 1e-5, 1e-6)


def test_one_macro_forwards_and_one_backwards():
    given = call()
    live = {key: given[key] for key in FLOATS}
    fun = jax.grad(lambda live: run(given, **live).sum())
    assert neuronjax.trace(fun, live).names == ("ExpertMLPs", "BlockwiseMMBwd")


def test_no_weight_is_gathered_by_pair():
    """The largest temporary is that of one expert: not `[T, K, H, 2, I]`."""
    given = call(tokens=8, width=128, d_ff=128, local=16, experts=16, k=4)
    weights = ("expert_gate_up_weights", "expert_down_weights")
    held = {key: given[key] for key in weights}
    fun = jax.jit(lambda held: run(given, **held))
    report = fun.lower(held).compile().memory_analysis()
    one = 3 * 128 * 128 * 4
    assert report.temp_size_in_bytes < 4 * one


@pytest.mark.parametrize("mode", ["PRE_SCALE", "PRE_SCALE_DELAYED"])
def test_scaling_before_the_experts_is_refused(mode):
    with pytest.raises(ValueError, match="must be NO_SCALE or POST_SCALE"):
        run(call(), expert_affinities_scaling_mode=mode)


def test_a_result_on_chip_is_refused_with_the_way_to_it():
    with pytest.raises(NotImplementedError, match="no meaning .*expert_mlps_kernel"):
        run(call(), output_in_sbuf=True)


def test_the_limits_of_the_chip_are_reported_and_do_not_hold():
    given = call(tokens=129)
    report = neuronjax.can("moe_tkg", **given)
    assert report and report.nearest == {"T": 128}
    assert neuronjax.can("moe_tkg", **call(tokens=129, **ALL)).on_chip
