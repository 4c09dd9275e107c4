"""The decode block against its equations in float64, and what its caches hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import neuronjax
from neuronjax.primitives import registry
from tests.attention_block_case import (
    COMBINATIONS,
    E4M3,
    call,
    combination,
    operands,
    reference,
    sizes,
)
from tests.macro_case import error

FAMILY = registry.resolve_family("AttentionBlockTkg")


def run(arrays, options):
    return jax.jit(lambda arrays: call(arrays, options))(arrays)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_it_equals_the_equations(name):
    arrays, options = combination(name)
    outs, wanted = run(arrays, options), reference(arrays, options)
    fp8 = options.get("fp8") and options.get("round_activations", True)
    for out, exact in zip(outs, wanted, strict=True):
        assert out.shape == exact.shape
        # A float32 key on the edge between two codes may round the other way.
        assert error(out, exact) <= (2**-4 if fp8 else 5e-6)
    assert outs[0].dtype == jnp.float32
    stored = E4M3 if fp8 else jnp.float32
    assert {out.dtype for out in outs[1:]} == {jnp.dtype(stored)}


@pytest.mark.parametrize("name", ["every norm", "blocks", "static", "fp8", "skipped"])
def test_float64_keeps_its_precision(name):
    with jax.enable_x64(True):
        arrays, options = combination(name, "float64")
        outs = run(arrays, options)
        for out, exact in zip(outs, reference(arrays, options), strict=True):
            # The product of two float32 scales is rounded to float32.
            assert error(out, exact) <= (1e-7 if name == "static" else 1e-12)


@pytest.mark.parametrize(
    "name", [*COMBINATIONS][:3] + ["interleaved", "blocks", "row", "static", "fp8"]
)
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(name):
    arrays, options = combination(name, "bfloat16")
    got = run(arrays, options)
    with neuronjax.plain():
        plain = run(arrays, options)
    for a, b, c in zip(got, plain, reference(arrays, options), strict=True):
        assert a.dtype == b.dtype
        assert error(a, c) <= 2 * error(b, c) + 2**-9


def test_one_call_is_one_macro():
    arrays, options = combination("every norm")
    trace = neuronjax.trace(lambda a: call(a, options), arrays)
    assert trace.count("AttentionBlockTkg") == 1

    def loss(x):
        return sum(jnp.sin(out).sum() for out in call(arrays | dict(X=x), options))

    trace = neuronjax.trace(jax.grad(loss), arrays["X"])
    assert trace.count("AttentionBlockTkg") == 1
    assert trace.count("AttentionBlockTkgBwd") == 1


def test_knobs_that_carry_no_mathematics_change_no_value():
    arrays, options = combination("bare")
    arrays["W_out"] = jnp.ones((8, 6))
    for more in (dict(enable_fa_s_prior_tiling=False), dict(out_in_sb=True)):
        for a, b in zip(run(arrays, options | more), run(arrays, options), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(NotImplementedError, match="sbm = given has no meaning for a"):
        call(arrays, options | dict(sbm=object()))


def test_epsilons_that_are_not_named_are_those_of_the_reference():
    arrays, options = combination("every norm")
    named = {
        f"rmsnorm_{side}_eps": 1e-6 for side in ("X", "QK_pre_rope", "QK_post_rope")
    }
    for a, b in zip(run(arrays, options), run(arrays, options | named), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_scale_may_be_an_array():
    arrays, options = combination("scale")
    scale = jnp.float32(options["softmax_scale"])
    more = {k: x for k, x in options.items() if k != "softmax_scale"}
    outs = jax.jit(lambda s: call(arrays | dict(softmax_scale=s), more))(scale)
    for a, b in zip(outs, run(arrays, options), strict=True):
        assert error(a, b) <= 1e-6


def test_a_decode_with_queries_keys_and_sums_only_at_its_own_position():
    """R-14, R-16: zero scores average the visible values; an empty row gives 0."""
    width, lengths = 2, [0, 1, 4]
    values = jnp.repeat(jnp.array([1.0, 2.0, 3.0, 6.0])[None, :, None], width, 2)
    mask = np.zeros((5, 3, 1, 1), np.int32)
    for b, length in enumerate(lengths):
        mask[:length, b] = 1
    call = jax.jit(
        lambda mask: neuronjax.attention_block_tkg(
            jnp.zeros((3, 1, 2)),
            W_qkv=jnp.zeros((2, 6)),
            K_cache=jnp.zeros((3, 5, width)),
            V_cache=jnp.pad(jnp.repeat(values, 3, 0), ((0, 0), (0, 1), (0, 0))),
            attention_mask=mask,
            update_cache=False,
        )[0]
    )
    out = call(jnp.asarray(mask))
    np.testing.assert_allclose(out[:, 0, :, 0], np.repeat([[0], [1], [3]], 2, 1), 1e-6)


def test_rotated_pairs_are_those_of_both_layouts():
    """R-18."""
    one = dict(
        W_qkv=jnp.concatenate([jnp.eye(4)] * 3, 1),
        K_cache=jnp.zeros((1, 2, 4)),
        V_cache=jnp.zeros((1, 2, 4)),
        cos=jnp.array([0.0, 1.0]).reshape(2, 1, 1),
        sin=jnp.array([1.0, 0.0]).reshape(2, 1, 1),
        skip_attention=True,
        update_cache=False,
    )
    x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]])
    for contiguous, wanted in ((True, [-3, 2, 1, 4]), (False, [-2, 1, 3, 4])):
        query, key, value = neuronjax.attention_block_tkg(
            x, rope_contiguous_layout=contiguous, **one
        )
        assert query.ravel().tolist() == key.ravel().tolist() == wanted
        assert value.ravel().tolist() == [1, 2, 3, 4]


def test_fp8_keys_saturate_and_keep_their_nan():
    """R-22."""
    rows = jnp.array([[1.0, 100.0, -100.0, jnp.nan]]).T[:, None]
    outs = neuronjax.attention_block_tkg(
        rows,
        W_qkv=jnp.ones((1, 3)),
        K_cache=jnp.zeros((4, 2, 1), E4M3),
        V_cache=jnp.zeros((4, 2, 1), E4M3),
        k_scale=jnp.full((1, 1), 3.0),
        v_scale=jnp.full((128, 1), 2.0),
        skip_attention=True,
        update_cache=False,
    )
    assert outs[1].dtype == outs[2].dtype == E4M3
    np.testing.assert_array_equal(np.float32(outs[1]).ravel(), [3, 240, -240, np.nan])
    np.testing.assert_array_equal(np.float32(outs[2]).ravel(), [2, 192, -192, np.nan])


def decode(arrays, options, steps):
    """Tokens one by one into the cache that holds nothing, by `lax.scan`."""
    empty = [jnp.zeros_like(arrays[k]) for k in ("K_cache", "V_cache")]
    fixed = {k: arrays[k] for k in ("W_qkv", "W_out", "sink")}
    slots, batch, heads, _ = arrays["attention_mask"].shape

    def step(caches, at):
        x = lax.dynamic_slice_in_dim(arrays["X"], at, 1, 1)
        # The new token is the last visible slot; the cache is seen below `at`.
        slot = jnp.arange(slots)[:, None, None, None]
        mask = jnp.broadcast_to(
            (slot < at) | (slot == slots - 1), (slots, batch, heads, 1)
        )
        index = jnp.full((batch, 1), at)
        out, *caches = call(
            dict(
                fixed,
                X=x,
                K_cache=caches[0],
                V_cache=caches[1],
                attention_mask=mask,
                kv_cache_update_idx=index,
            ),
            options,
        )
        return caches, out

    _, outs = lax.scan(step, empty, jnp.arange(steps, dtype=jnp.int32))
    return jnp.moveaxis(outs, 0, 1)


def test_decoding_token_by_token_equals_one_causal_pass():
    """R-14: every position, 0 and the last slot included."""
    n = sizes(batch=2, seq=6, slots=7, visible=7)
    arrays = operands(n, {}, without=("cos", "sin", "bias_qkv", "bias_out"))
    outs = jax.jit(lambda a: decode(a, {}, 6))(arrays)
    mask = np.zeros((6, 2, 2, 6), np.int32)
    mask[:] = np.tri(6, dtype=int).T[:, None, None]
    whole = dict(arrays, attention_mask=jnp.asarray(mask))
    whole["kv_cache_update_idx"] = jnp.zeros((2, 1), jnp.int32)
    wanted = run(whole, {})[0].reshape(outs.shape)
    assert error(outs, wanted) <= 5e-6


def test_several_new_tokens_equal_one_after_the_other():
    """A tree of speculative tokens is what the mask says of the last slots."""
    arrays, options = combination("bare")
    mask = np.array(arrays["attention_mask"])
    mask[-1, :, :, 0] = 1  # the first query sees the second token too
    mask[-2, :, :, 1] = 0
    arrays = dict(arrays, attention_mask=jnp.asarray(mask))
    for out, exact in zip(
        run(arrays, options), reference(arrays, options), strict=True
    ):
        assert error(out, exact) <= 5e-6


def test_mapped_calls_are_one_macro_and_equal_a_loop():
    arrays, options = combination("every norm")
    stacked = {k: jnp.stack([x, x[..., ::-1]]) for k, x in arrays.items()}
    stacked["kv_cache_update_idx"] = jnp.array([[[0], [3]], [[7], [1]]], jnp.uint32)
    mapped = jax.vmap(lambda a: call(a, options))
    assert neuronjax.trace(mapped, stacked).count("AttentionBlockTkg") == 1
    outs = jax.jit(mapped)(stacked)
    for i in range(2):
        one = reference({k: x[i] for k, x in stacked.items()}, options)
        for out, exact in zip(outs, one, strict=True):
            assert error(out[i], exact) <= 5e-6
