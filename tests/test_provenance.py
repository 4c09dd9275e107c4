"""`neuronjax.poison` names the macro that reads what it must not, and no other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import emit
from neuronjax.models.load import load_llama
from neuronjax.tools.provenance_report import Poisoning
from tests.test_llama import CONFIG, weights
from tests.test_moe_lm import TOKENS, model_of

SMALL = dataclasses.replace(CONFIG, num_layers=2)


def masked_sum(x, keep):
    """0 * NaN is NaN: what the mask hides still reaches the sum."""
    return jnp.sum(x * keep.astype(x.dtype)[:, None], 0)


def masked_sum_plain(x, keep):
    return jnp.sum(jnp.where(keep[:, None], x, 0), 0)


LEAKY = neuronjax.register_kernel("LeakySum", masked_sum, plain=masked_sum_plain)
CAREFUL = neuronjax.register_kernel("CarefulSum", masked_sum_plain)
X = jax.random.normal(jax.random.key(0), (5, 3))
KEEP = jnp.array([True, True, False, True, False])


def test_a_leaking_kernel_is_named_with_output_element_and_count():
    with neuronjax.poison() as report:
        out = LEAKY(X, KEEP)
    assert not report and len(report.leaks) == 1
    leak = report.first
    assert (leak.name, leak.output, leak.layer) == ("LeakySum", "out", 0)
    assert leak.elements == 3 and leak.index == (0,)
    assert report.filled["LeakySum"] == 2 * 3
    # The program itself goes on with the untouched result.
    np.testing.assert_allclose(out, masked_sum_plain(X, KEEP), rtol=1e-6)
    assert "LeakySum leaks into out in layer 0" in str(report)


def test_a_leak_is_found_without_a_plain_form():
    """Other finite values behind the mask change nothing: so it is not to be read."""
    alone = neuronjax.register_kernel("LeakyAlone", masked_sum)
    with neuronjax.poison() as report:
        alone(X, KEEP)
    assert report.first.name == "LeakyAlone"


def test_a_careful_kernel_passes():
    with neuronjax.poison() as report:
        CAREFUL(X, KEEP)
    assert report and report.first is None
    assert report.filled["CarefulSum"] == 2 * 3
    assert "no macro leaks; 6 unseen elements" in report.verdict


def test_the_layer_is_told_and_what_follows_is_not_blamed():
    """The mask of layer 1 hides a row; those of layers 0 and 2 hide none."""
    masks = jnp.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)

    @jax.jit
    def model(x):
        for keep in masks:
            x = x + LEAKY(x, keep)
            x = neuronjax.rms_norm(x, jnp.ones(3))
        return x

    def scanned(x):
        def layer(x, keep):
            return neuronjax.rms_norm(x + LEAKY(x, keep), jnp.ones(3)), None

        return jax.lax.scan(layer, x, masks)[0]

    for run in (model, jax.jit(scanned)):
        with neuronjax.poison() as report:
            out = run(X)
        assert np.isfinite(out).all()
        assert [(leak.name, leak.layer) for leak in report.leaks] == [("LeakySum", 1)]
        assert report.examined == {"LeakySum": 3, "NeuronReduceMacro": 3}


def test_a_llama_is_clean_in_prefill_and_decode():
    model = load_llama(SMALL, weights(SMALL), scan_layers=True)
    tokens = jax.random.randint(jax.random.key(0), (2, 5), 0, CONFIG.vocab_size)
    lengths = jnp.array([5, 3], jnp.int32)
    wanted, held = jax.jit(lambda t, n: model.prefill(t, n, 8))(tokens, lengths)
    wanted_next, _ = jax.jit(model.decode)(tokens[:, :1], held)
    with neuronjax.poison() as report:
        logits, cache = jax.jit(lambda t, n: model.prefill(t, n, 8))(tokens, lengths)
        following, _ = jax.jit(model.decode)(tokens[:, :1], cache)
    assert report, str(report)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(following, wanted_next, rtol=1e-5, atol=1e-5)
    layers, heads = SMALL.num_layers, SMALL.num_kv_heads * SMALL.head_dim
    assert report.examined["AttentionTkgFwd"] == layers
    # Of twice 8 slots 5 and 3 are in use; keys and values of the rest are filled.
    assert report.filled["AttentionTkgFwd"] == layers * heads * 2 * (3 + 5)


def test_a_gradient_is_examined_too():
    one = dataclasses.replace(SMALL, num_layers=1)
    model = load_llama(one, weights(one))
    tokens = jax.random.randint(jax.random.key(0), (1, 4), 0, CONFIG.vocab_size)
    graph, state = nnx.split(model)

    def loss(state):
        return jnp.sum(nnx.merge(graph, state)(tokens) ** 2)

    with neuronjax.poison() as report:
        jax.jit(jax.grad(loss))(state)
    assert report, str(report)
    assert report.examined["BackwardsAttention"] == report.examined["MLPBwd"] == 1


def test_a_model_of_experts_is_clean():
    model = model_of("mixtral")
    with neuronjax.poison() as report:
        jax.jit(model)(TOKENS)
    assert report, str(report)
    # Padding slots of the blocks, and affinities for experts that were not chosen.
    assert report.filled["BlockwiseMM"] > 0 and report.examined["RouterTopK"] == 2


def _decode(cache_value):
    q = jax.random.normal(jax.random.key(1), (2, 4, 1, 8))
    new = jax.random.normal(jax.random.key(2), (2, 2, 1, 8))
    keys = jax.random.normal(jax.random.key(3), (2, 2, 8, 6))
    keys = keys.at[..., 3:].set(cache_value)
    values = jnp.swapaxes(keys, 2, 3)
    return emit.attention_tkg_fwd_kernel(
        q, new, new, keys, values, lengths=jnp.array([3, 2], jnp.int32)
    )


def test_nan_that_was_put_there_by_hand_is_followed():
    with neuronjax.poison() as report:
        out = _decode(jnp.nan)
    assert report and np.isfinite(out).all()
    # Another program: its last bits may differ.
    np.testing.assert_allclose(out, _decode(0.0), rtol=1e-5, atol=1e-6)


def test_nan_that_an_operation_may_see_is_no_leak():
    with neuronjax.poison() as report:
        out = neuronjax.rms_norm(X.at[1, 1].set(jnp.nan), jnp.ones(3))
    assert report and np.isnan(out[1]).all() and np.isfinite(out[0]).all()


def test_zeros_by_chance_are_not_taken_for_unseen():
    """A weight that meets zeros has no derivative here, yet it is read."""
    x, w = jnp.zeros((2, 1, 8)), jnp.ones((8, 6))
    with neuronjax.poison() as report:
        neuronjax.mlp(x, w, w, jnp.ones((6, 8)))
    assert report, str(report)
    assert report.filled["MLP"] == 0


def test_mapped_macros_are_examined():
    keep = jnp.stack([KEEP, jnp.ones(5, bool)])
    with neuronjax.poison() as report:
        jax.jit(jax.vmap(LEAKY, (None, 0)))(X, keep)
    assert report.first.name == "LeakySum" and report.filled["LeakySum"] == 6


def test_macros_of_every_device_are_examined():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = P(None, "data"), P()
    local = jax.shard_map(LEAKY, mesh=mesh, in_specs=specs, out_specs=P("data"))
    with neuronjax.poison() as report:
        jax.jit(local)(jnp.ones((5, 4)), KEEP)
    assert report.examined["LeakySum"] == 2
    assert [leak.elements for leak in report.leaks] == [2, 2]


def test_a_block_in_which_nothing_ran_is_not_clean():
    with neuronjax.poison() as report:
        jnp.sin(X)
    assert not report and report.verdict == "no macro ran"


def test_after_the_block_nothing_is_examined():
    run = jax.jit(lambda x: LEAKY(x, KEEP))
    with neuronjax.poison() as report:
        run(X)
    assert report.examined["LeakySum"] == 1
    run(X)
    assert report.examined["LeakySum"] == 1
    assert neuronjax.trace(run, X).count("LeakySum") == 1


def test_layers_are_told_whichever_examination_reports_first():
    """Two calls of a program of three macros: the second one of each leaks."""
    report = Poisoning()
    for order in (1, 0, 2, 0, 2, 1):
        shapes = (2,), (3,)
        leaks = [0, int(order == 1)]
        report.record(order, "LeakySum", ("a", "b"), shapes, leaks, [0, 2], 1)
    told = [(leak.output, leak.layer, leak.index) for leak in report.leaks]
    assert told == [("b", 1, (2,)), ("b", 4, (2,))]


def test_it_is_refused_in_plain_mode():
    with neuronjax.plain(), pytest.raises(ValueError, match="plain"):
        with neuronjax.poison():
            pass
