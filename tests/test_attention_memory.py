"""Attention's temporaries grow with the sequence and never with its square."""

import jax
import jax.numpy as jnp
import pytest

import neuronjax
from tests.hlo import Program, program

SIZES = 1024, 2048, 4096
OPTIONS = dict(
    causal={},
    window=dict(sliding_window=128, sink=True),
    full=dict(causal_mask=False, logits_soft_cap=2.0),
    prefix=dict(prior=True),
    dropout=dict(dropout_rate=0.5),
)


def _compiled(seq, gradient, options):
    """The program of one head, queries and keys `seq` long, and its text."""
    options = dict(options)
    row = jax.ShapeDtypeStruct((1, seq, 16), jnp.float32)
    operands = dict(q=row, k=row, v=row)
    if options.pop("sink", False):
        operands["sink"] = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    if options.pop("prior", False):
        operands |= dict(k_prior=row, v_prior=row)
        options["prior_used_len"] = jnp.array([seq // 2], jnp.int32)
    if options.get("dropout_rate"):
        options["dropout_key"] = jax.random.key(0)

    def run(operands):
        return neuronjax.attention_cte(**operands, **options, tp_k=True)

    def loss(operands):
        return jnp.sum(run(operands) ** 2)

    lowered = jax.jit(jax.grad(loss) if gradient else run).lower(operands)
    return lowered.compile()


@pytest.mark.parametrize(
    ("name", "gradient"),
    [("causal", False), ("window", False), *((name, True) for name in OPTIONS)],
)
def test_temporary_memory_is_linear_in_the_sequence(name, gradient):
    sizes = SIZES if gradient and name in ("causal", "window") else SIZES[::2]
    compiled = [_compiled(seq, gradient, OPTIONS[name]) for seq in sizes]
    for each, seq in zip(compiled, sizes, strict=True):
        assert not Program(each.as_text()).large(seq * seq)
    used = [x.memory_analysis().temp_size_in_bytes for x in compiled]
    # All scores of one head would be 64 MiB at 4096.
    assert used[-1] < 8 << 20
    for small, large in zip(used, used[1:], strict=False):
        ratio = sizes[1] / sizes[0]
        assert large <= 1.1 * ratio * small


def test_the_search_for_squares_finds_them():
    def plain(q, k):
        return jax.nn.softmax(q @ k.T) @ k

    row = jax.ShapeDtypeStruct((1024, 4), jnp.float32)
    found = program(plain, row, row)
    assert found.large(1024**2) and not found.large(2048**2)
