"""What the loss of a large vocabulary holds in memory, and what its programs do.

Compiled, not run: sizes are those of the compiled program.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import neuronjax
from tests.hlo import program

TOKENS, VOCAB = 1024, 128256
OPTIONS = {
    "plain": {},
    "ignore": dict(ignore_index=-100),
    "all": dict(ignore_index=-100, label_smoothing=0.1, z_loss=1e-4),
}


def shapes(dtype="float32", vocab=VOCAB):
    targets = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return jax.ShapeDtypeStruct((TOKENS, vocab), dtype), targets


def value_and_grad(**options):
    return jax.value_and_grad(
        lambda logits, y: neuronjax.cross_entropy(logits, y, **options)
    )


def beyond_inputs(fun, *args, **options):
    """Bytes of temporaries, and of outputs that take no input's buffer."""
    memory = jax.jit(fun, **options).lower(*args).compile().memory_analysis()
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + own


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_value_and_gradient_take_the_gradient_alone(options):
    logits, targets = shapes()
    size = logits.size * 4
    beyond = beyond_inputs(value_and_grad(**options), logits, targets)
    assert size <= beyond <= 1.01 * size


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_gradient_takes_the_buffer_of_donated_logits(options):
    logits, targets = shapes()
    fun = value_and_grad(**options)
    assert beyond_inputs(fun, logits, targets, donate_argnums=0) <= 2**20


def test_narrow_logits_are_not_widened_as_a_whole():
    logits, targets = shapes("bfloat16")
    size = logits.size * 2
    assert beyond_inputs(value_and_grad(), logits, targets) <= 1.1 * size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_in_place_takes_the_donated_buffer(dtype):
    logits, targets = shapes(dtype)
    lse = jax.ShapeDtypeStruct((TOKENS,), jnp.float32)

    def backward(logits, targets, lse):
        return neuronjax.cross_entropy_backward(logits, targets, lse, dtype=dtype)

    assert beyond_inputs(backward, logits, targets, lse, donate_argnums=0) == 0


def test_donated_logits_give_the_same_gradient():
    x = jax.random.normal(jax.random.key(0), (4, 30))
    y = jnp.array([0, 29, 7, 7])
    fun = value_and_grad()
    wanted = jax.jit(fun)(x, y)
    donated = jnp.copy(x)
    got = jax.jit(fun, donate_argnums=0)(donated, y)
    assert donated.is_deleted() and not x.is_deleted()
    assert all(map(jnp.array_equal, jax.tree.leaves(got), jax.tree.leaves(wanted)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_scatters(dtype):
    lowered = jax.jit(value_and_grad()).lower(*shapes(dtype, 3000))
    assert "stablehlo.gather" in lowered.as_text()
    assert "stablehlo.scatter" not in lowered.as_text()
    assert not program(value_and_grad(), *shapes(dtype, 3000)).find("scatter")


def factors(tokens, d_model, vocab):
    x = jax.ShapeDtypeStruct((tokens, d_model), jnp.float32)
    w = jax.ShapeDtypeStruct((d_model, vocab), jnp.float32)
    return x, w, jax.ShapeDtypeStruct((tokens,), jnp.int32)


def plain(x, w, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()


@pytest.mark.parametrize(
    ("tokens", "vocab", "share"), [(2048, 32000, 0.35), (1024, 128256, 0.5)]
)
def test_factors_take_a_part_of_what_all_logits_take(tokens, vocab, share):
    args = factors(tokens, 512, vocab)
    ours, theirs = (
        beyond_inputs(jax.value_and_grad(loss, (0, 1)), *args)
        for loss in (neuronjax.linear_cross_entropy, plain)
    )
    assert ours <= share * theirs


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_logits_of_all_tokens_never_exist(reduction):
    args = factors(1024, 8, 5000)

    def loss(x, w, y):
        options = dict(reduction=reduction, block_size=128)
        return jnp.sum(neuronjax.linear_cross_entropy(x, w, y, **options))

    found = program(jax.value_and_grad(loss, (0, 1)), *args)
    assert not found.large(1024 * 5000) and found.large(128 * 5000)
