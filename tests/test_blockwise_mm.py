"""The macro `BlockwiseMM` itself: both directions of its derivative are transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neuronjax.kernels.blockwise_mm.operands import Operands
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.mx.formats import FORMATS
from neuronjax.kernels.mx.layout import HIDDEN, INTERMEDIATE, pack_weight
from neuronjax.primitives.blockwise_mm.macro import blockwise_mm
from neuronjax.primitives.blockwise_mm.names import FORWARD

TOKENS, EXPERTS, SIZE = 4, 2, 3
TOKEN_ID = [0, 3, TOKENS, 2, 1, 0, TOKENS, TOKENS, 2]
CLAMPS = dict(gate_clamp_upper_limit=0.7, up_clamp_lower_limit=-0.6)
OPTIONS = {
    "post": {},
    "pre, clamps": dict(scaling="PRE_SCALE", **CLAMPS),
    "no, recompute": dict(scaling="NO_SCALE", checkpoint="recompute"),
    "on intermediate": dict(on_intermediate=True),
}


def normal(seed, *shape, dtype="float32"):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x / 2, dtype)


def operands(dtype, is_packed, has_down_bias):
    """A block in two of each expert, empty slots among them."""
    width, d_ff = (512, 24) if is_packed else (6, 5)
    kind = FORMATS["float8_e4m3fn"]
    rows, ids = TOKENS + 1, jnp.asarray(TOKEN_ID, jnp.int32)
    block_expert = jnp.array([0, 1, 0], jnp.int32)
    hidden = normal(0, rows, width, dtype=dtype)
    affinity = normal(1, rows * EXPERTS, 1, dtype=dtype)
    down_b = normal(2, EXPERTS, width, dtype=dtype) if has_down_bias else None
    if not is_packed:
        gate_up = normal(3, EXPERTS, width, 2, d_ff, dtype=dtype)
        down = normal(4, EXPERTS, d_ff, width, dtype=dtype)
        bias = normal(5, EXPERTS, 2, d_ff, dtype=dtype)
        given = (gate_up, down, ids, block_expert, bias, down_b)
        return Operands(hidden, affinity, *given)
    sides = [
        [pack_weight(normal(e + 9 * j, width, d_ff) / 9, HIDDEN, kind) for j in (0, 1)]
        for e in range(EXPERTS)
    ]
    gate_up, scale = (
        jnp.stack([jnp.stack([side[part] for side in pair], 1) for pair in sides])
        for part in (0, 1)
    )
    packed = [pack_weight(normal(e, d_ff, width), INTERMEDIATE, kind) for e in (7, 8)]
    down, down_scale = (jnp.stack(parts) for parts in zip(*packed, strict=True))
    bias = normal(5, EXPERTS, down.shape[1], 2, down.shape[2], 4, dtype=dtype)
    given = (gate_up, down, ids, block_expert, bias, down_b, scale, down_scale)
    return Operands(hidden, affinity, *given)


def directional(config, ops, seed):
    """`<cotangent, jvp>` and `<vjp, tangent>`, in float64, of every output."""
    floats = [
        key
        for key, x in ops._asdict().items()
        if x is not None and is_differentiable(x.dtype)
    ]

    def call(*live):
        given = ops._replace(**dict(zip(floats, live, strict=True)))
        return blockwise_mm(*given, name=FORWARD, block_size=SIZE, **config)

    live = [getattr(ops, key) for key in floats]
    dots = [normal(seed + i, *x.shape, dtype=x.dtype) for i, x in enumerate(live)]
    outs, moved = jax.jit(lambda a, t: jax.jvp(call, a, t))(live, dots)
    seeds = [normal(90 + i, *x.shape, dtype=x.dtype) for i, x in enumerate(outs)]
    _, pull = jax.vjp(jax.jit(call), *live)

    def inner(xs, ys):
        pairs = zip(xs, ys, strict=True)
        return sum(np.vdot(np.float64(x), np.float64(y)) for x, y in pairs)

    return inner(seeds, moved), inner(pull(tuple(seeds)), dots)


@pytest.mark.parametrize(
    "options, is_packed",
    [*((options, False) for options in OPTIONS), ("on intermediate", True)],
)
def test_the_backward_is_the_transpose_of_the_forward_derivative(options, is_packed):
    """With cotangents of what is stored, those at empty slots among them."""
    config = dict(OPTIONS[options])
    ops = operands("float32", is_packed, "on_intermediate" not in config)
    if is_packed:
        config |= dict(quantization="MX", weight_format="float8_e4m3fn")
    forward, backward = directional(config, ops, 20)
    assert abs(forward - backward) <= 2e-5 * max(1, abs(forward))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_operands_have_tangents(dtype):
    """Leaves read them as bits, which have none: tangents go another way."""
    forward, backward = directional({}, operands(dtype, False, True), 40)
    assert abs(forward) > 1
    assert abs(forward - backward) <= 2e-2 * abs(forward)


def test_what_empty_slots_store_is_a_constant():
    """They store what a row of zeros gives; a block without a token stores zeros."""
    ops = operands("float32", False, True)
    is_empty = np.asarray(TOKEN_ID).reshape(-1, SIZE) == TOKENS

    def at_empty_slots(bias):
        given = ops._replace(gate_up_b=bias)
        _, gate_up, _ = blockwise_mm(*given, name=FORWARD, block_size=SIZE)
        return gate_up.transpose(0, 3, 1, 2)[is_empty]

    found, moved = jax.jvp(at_empty_slots, [ops.gate_up_b], [ops.gate_up_b])
    np.testing.assert_allclose(found[0], ops.gate_up_b[0])
    assert not np.any(moved)
    (d_bias,) = jax.vjp(at_empty_slots, ops.gate_up_b)[1](jnp.ones_like(found))
    assert not np.any(d_bias)


def test_a_gate_beyond_float16_has_finite_gradients():
    ops = operands("float16", False, True)
    ops = ops._replace(gate_up_b=ops.gate_up_b.at[:, 0].set(-60000.0))
    ops = ops._replace(hidden=ops.hidden * 30, gate_up_w=ops.gate_up_w * 1000)
    config = dict(block_size=SIZE, gate_clamp_lower_limit=-1e5)

    def total(x):
        out, *_ = blockwise_mm(*ops._replace(hidden=x), name=FORWARD, **config)
        return jnp.sum(jnp.where(jnp.isfinite(out), out, 0).astype("float32"))

    _, gate_up, _ = blockwise_mm(*ops, name=FORWARD, **config)
    assert gate_up[:, 0].min() == jnp.finfo("float16").min
    assert not np.any(np.isnan(jax.grad(total)(ops.hidden)))
