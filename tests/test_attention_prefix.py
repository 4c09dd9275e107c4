"""Attention after a prefix: used lengths, alignment, and the emitter of its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from neuronjax.emit import attention_prefix_caching_fwd_kernel
from tests.attention_case import CASES, error
from tests.attention_equations import Attention, visible
from tests.prefill_case import CAUSAL, FULL, one_head


def _zeros(q_seq, kv_seq, prior):
    """Queries, keys and prior keys that score 0 everywhere, laid out for tp_k."""
    return (jnp.zeros((1, n, 1)) for n in (q_seq, kv_seq, prior))


def test_a_prefix_of_three_aligns_the_triangle():
    """R-03: prior 3 + active 2."""
    q, k, k_prior = _zeros(2, 2, 3)
    options = dict(k_prior=k_prior, v_prior=one_head(1, 2, 3), tp_k=True)
    used = jnp.array([3], jnp.int32)
    got = neuronjax.attention_cte(q, k, one_head(4, 5), prior_used_len=used, **options)
    np.testing.assert_allclose(got.ravel(), [2.5, 3.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_slots_past_the_used_length_are_not_read(bad):
    """R-17: used 2 gives 3, used 0 gives 6; traced, and mapped."""
    q, k, k_prior = _zeros(1, 1, 4)
    k_prior = k_prior.at[0, 2:].set(bad)

    def run(used, v):
        prior = dict(k_prior=k_prior, v_prior=one_head(1, 2, bad, bad), tp_k=True)
        return neuronjax.attention_cte(q, k, v, prior_used_len=used, **prior).ravel()

    v = one_head(6)
    for used, out, slope in ((2, 3.0, 1 / 3), (0, 6.0, 1.0)):
        length = jnp.array([used], jnp.int32)
        np.testing.assert_allclose(run(length, v), [out])
        np.testing.assert_allclose(jax.jit(run)(length, v), [out])
        got = jax.jit(jax.grad(lambda used, v: run(used, v).sum(), 1))(length, v)
        np.testing.assert_allclose(got.ravel(), [slope], rtol=1e-6)
    lengths = jnp.array([[2], [0], [1]], jnp.int32)
    got = jax.jit(jax.vmap(run, (0, None)))(lengths, v)
    np.testing.assert_allclose(got.ravel(), [3.0, 6.0, 3.5])


@pytest.mark.parametrize("used", [0, 1, -1, None], ids=str)
@pytest.mark.parametrize("name", ["prefix", "long_prefix"])
def test_every_used_length_is_one_program(name, used):
    """0, 1, all but one and all slots; gradients of unused slots are exactly 0."""
    case = CASES[name]
    used = case.prior if used is None else used % case.prior
    case = dataclasses.replace(case, used=used)
    floats, cotangents = case.floats(), case.cotangents()
    outs, grads = case.program()(floats, case.rest(), cotangents)
    whole = case.reference(floats)
    for got, wanted in zip(outs, whole.outputs()[:3], strict=True):
        assert error(got, wanted) <= 1e-5
    d_out, d_neg_max, d_recip = map(np.asarray, cotangents)
    wanted = whole.gradients(d_out, d_neg_max=d_neg_max, d_recip=d_recip)
    for label, gradient in case.split(wanted).items():
        assert error(grads[label], gradient) <= 2e-5, label
    for label in ("k_prior", "v_prior"):
        assert not np.asarray(grads[label])[:, used:].any()


def test_used_lengths_map_over_a_batch():
    """R-42: gradients too; the keys of the call are shared by the batch."""
    case = CASES["prefix"]
    floats, rest = case.floats(), case.rest()
    lengths = jnp.arange(0, 31, 10, dtype=jnp.int32)[:, None]
    weights = jnp.arange(1.0, 5)

    def loss(floats, used):
        out, neg_max, _ = case.call(floats, dict(rest, prior_used_len=used))
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(neg_max))

    def mapped(floats):
        return jax.vmap(loss, (None, 0))(floats, lengths) @ weights

    got, grads = jax.jit(jax.value_and_grad(mapped))(floats)
    single = jax.jit(jax.value_and_grad(loss))
    each = [single(floats, used) for used in lengths]
    parts = zip(each, weights, strict=True)
    wanted = jax.tree.map(lambda *x: sum(x), *(jax.tree.map(lambda x, w=w: w * x, p)
                                               for p, w in parts))  # fmt: skip
    np.testing.assert_allclose(got, wanted[0], rtol=1e-5)
    for label, gradient in wanted[1].items():
        assert error(grads[label], gradient) <= 1e-5, label


def test_a_prefix_is_keys_put_in_front():
    """The used slots beside the keys, with the positions in a mask."""
    case = CASES["prefix"]
    floats = case.floats()
    k, v = (
        jnp.concatenate([floats[f"{n}_prior"][:, : case.used], floats[n]], 1)
        for n in "kv"
    )
    options = dict(scale=case.scale, causal_mask=False, tp_k=True, cache_softmax=True)
    behind = jnp.arange(case.used + case.kv_seq) - case.used
    mask = behind <= jnp.arange(case.q_seq)[:, None]
    wanted = neuronjax.attention_cte(floats["q"], k, v, mask=mask[None], **options)
    got = case.program()(floats, case.rest(), case.cotangents())[0]
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) <= 1e-6


def _kernel_operands(tp_k):
    """Operands of the emitter, its options, and their float64 attention."""
    rng = np.random.default_rng(4)
    shapes = (4, 9, 5), (2, 7, 5), (2, 7, 3), (2, 12, 5), (2, 12, 3), (4, 1)
    *arrays, sink = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    masks = [rng.random(shape) < 0.7 for shape in ((4, 9, 12), (1, 9, 7))]
    q, k, v, k_prior, v_prior = arrays
    turned = [q, k, v, k_prior, v_prior] if tp_k else [q, k.mT, v, k_prior.mT, v_prior]
    return arrays, turned, sink, masks


@pytest.mark.parametrize(("name", "tp_k"), [(CAUSAL, True), (FULL, False)])
def test_the_emitter_takes_a_mask_of_the_prefix(name, tp_k):
    """Values and gradients with both masks and a sink, used length 10 of 12."""
    (q, k, v, k_prior, v_prior), turned, sink, masks = _kernel_operands(tp_k)
    turned[0] = turned[0] if tp_k else q.mT  # tp_q follows tp_k here
    scale = 1.0 if name == CAUSAL else 0.5
    whole = np.concatenate([np.broadcast_to(x, (4, 9, x.shape[2])) for x in masks], 2)
    seen = visible(9, 7, name == CAUSAL, whole, 4, prior=12, used=10)
    keys, values = (np.concatenate(x, 1) for x in ((k_prior, k), (v_prior, v)))
    run = functools.partial(
        attention_prefix_caching_fwd_kernel,
        kernel_name=name,
        prior_used_len=jnp.array([10], jnp.int32),
        prefix_mask=jnp.asarray(masks[0]),
        mask=jnp.asarray(masks[1]),
        scale=scale,
        tp_q=tp_k,
        tp_k=tp_k,
        cache_softmax=True,
    )
    jitted = jax.jit(lambda *a: run(*a[:-1], sink=a[-1]))
    outs, pull = jax.vjp(jitted, *turned, sink)
    reference = Attention(q, keys, values, seen, scale, sink=sink)
    for got, wanted in zip(outs, reference.outputs()[:3], strict=True):
        assert error(got, wanted) <= 1e-5
    d_out = jnp.cos(outs[0])
    seeds = d_out, *(jnp.zeros_like(x) for x in outs[1:])
    got = list(pull(seeds))
    got[0] = got[0] if tp_k else got[0].mT
    got[1], got[3] = (x if tp_k else x.mT for x in (got[1], got[3]))
    wanted = reference.gradients(np.asarray(d_out))
    parts = {n: np.split(wanted[n], [12], 1) for n in "kv"}
    order = wanted["q"], parts["k"][1], parts["v"][1], parts["k"][0], parts["v"][0]
    for a, b in zip(got, (*order, wanted["sink"]), strict=True):
        assert error(a, b) <= 2e-5


def test_the_emitter_without_a_length_uses_every_slot():
    arrays, turned, *_ = _kernel_operands(False)
    run = functools.partial(
        attention_prefix_caching_fwd_kernel, kernel_name=CAUSAL, tp_q=True
    )
    wanted = run(*turned, prior_used_len=jnp.array([12], jnp.int32))
    np.testing.assert_array_equal(run(*turned), wanted)
    (row,) = neuronjax.trace(run, *turned).rows
    assert row.name == CAUSAL and wanted.shape == (4, 9, 3)


def test_an_unknown_name_is_refused_in_the_contracts_words():
    turned = _kernel_operands(False)[1]
    for name in ("Nonsense", "AttentionMMSoftmaxMM"):
        message = f"Prefix caching is not implemented for this kernel name {name}"
        with pytest.raises(ValueError) as refusal:
            attention_prefix_caching_fwd_kernel(*turned, kernel_name=name, tp_q=True)
        assert message in str(refusal.value).splitlines()


def test_the_emitter_gates_the_scale_as_the_name_does():
    """R-11: the causal name takes 1 alone, in the contract's words."""
    turned = _kernel_operands(False)[1]
    options = dict(kernel_name=CAUSAL, tp_q=True, scale=0.5)
    with pytest.raises(ValueError) as refusal:
        attention_prefix_caching_fwd_kernel(*turned, **options)
    message = f"{CAUSAL} only supports scale equal to 1.0"
    assert message in str(refusal.value).splitlines()


@pytest.mark.parametrize("missing", ["k_prior", "v_prior", "prior_used_len"])
def test_a_part_of_a_prefix_is_refused(missing):
    case = CASES["prefix"]
    operands = {**case.floats(), **case.rest()}
    del operands[missing]
    with pytest.raises(ValueError, match="prior"):
        neuronjax.attention_cte(**operands, tp_k=True)


@pytest.mark.parametrize("used", [-1, 31])
def test_a_length_outside_the_buffer_is_refused(used):
    case = dataclasses.replace(CASES["prefix"], used=used)
    with pytest.raises(ValueError, match="prior_used_len"):
        case.call(case.floats(), case.rest())
