"""The fused decode block and the fused stack beside the layers that they fuse."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from neuronjax import nn
from neuronjax.models.mesh_packing import by_key_head
from tests.nn_case import stirred
from tests.nn_twins import HEAD_DIM, WIDTH, draw, tables

D_FF, LAYERS, HEADS, KV_HEADS = 12, 2, 4, 2
SIZES = WIDTH, D_FF, HEADS, KV_HEADS, HEAD_DIM


def decoder_layers():
    rngs = nnx.Rngs(0)
    return [stirred(nn.DecoderLayer(*SIZES, rngs=rngs)) for _ in range(LAYERS)]


def stack_of(layers, axis=None):
    """A stack with the weights of `layers`."""
    sizes = WIDTH, D_FF, LAYERS, HEADS, KV_HEADS, HEAD_DIM
    stack = nn.DecoderStack(*sizes, axis=axis, rngs=nnx.Rngs(0))
    places = dict(out="attention.out", attention_norm="attention.norm")
    places |= {name: f"mlp.{name}" for name in ("gate", "up", "down")}
    places |= dict(mlp_norm="mlp.norm", qkv="attention.qkv")
    for name, place in places.items():
        part, held = place.split(".")
        rows = [getattr(getattr(layer, part), held)[...] for layer in layers]
        if name == "qkv":
            rows = [by_key_head(row, HEADS, KV_HEADS) for row in rows]
        getattr(stack, name)[...] = jnp.stack(rows)
    return stack


def test_a_stack_is_its_layers():
    layers, x, (cos, sin) = decoder_layers(), draw(2, 5, WIDTH), tables(2, 5)
    wanted, caches = x, []
    for layer in layers:
        wanted, key, value = layer.prefill(wanted, cos, sin)
        caches.append((key.swapaxes(2, 3), value))
    stack = stack_of(layers)
    got, cache = stack.prefill(x, cos, sin, 7)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got, stack(x, cos, sin))
    for row, (key, value) in enumerate(caches):
        np.testing.assert_allclose(cache.key[row, ..., :5], key, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            cache.value[row, :, :, :5], value, rtol=1e-5, atol=1e-5
        )
    assert cache.key.shape[-1] == cache.value.shape[-2] == 7
    with pytest.raises(ValueError, match="slots must be at least seq = 5, got 4"):
        stack.prefill(x, cos, sin, 4)


def test_decoding_goes_on_where_prefill_ended():
    stack, x, table = stack_of(decoder_layers()), draw(2, 6, WIDTH), tables(2, 6)
    wanted = stack(x, *table)
    _, cache = stack.prefill(x[:, :3], *(t[:, :3] for t in table), 6)
    decode = nnx.jit(lambda stack, *args: stack.decode(*args))
    for start, end in ((3, 4), (4, 6)):
        new = x[:, start:end], *(t[:, start:end] for t in table)
        got, cache = decode(stack, *new, cache, jnp.full(2, start, jnp.int32))
        np.testing.assert_allclose(got, wanted[:, start:end], rtol=2e-5, atol=2e-5)


def test_ranks_share_heads_and_columns():
    stack = stack_of(decoder_layers(), "tensor")
    x, table = draw(2, 4, WIDTH), tables(2, 4)
    wanted = stack(x, *table)
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=devices)
    graph, state = nnx.split(stack)

    def run(state, x, cos, sin):
        own = nnx.merge(graph, state)
        out, cache = own.prefill(x[:, :3], cos[:, :3], sin[:, :3], 4)
        held = jnp.full(2, 3, jnp.int32)
        last, _ = own.decode(x[:, 3:], cos[:, 3:], sin[:, 3:], cache, held)
        return jnp.concatenate([out, last], 1)

    specs = nnx.get_partition_spec(state), P(), P(), P()
    call = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(call)(state, x, *table)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def blocks(**options):
    """A fused block, and `nn.Attention` with its weights."""
    block = nn.AttentionBlock(WIDTH, HEADS, HEAD_DIM, **options, rngs=nnx.Rngs(0))
    stirred(block)
    options.pop("interleaved", None)
    layer = nn.Attention(WIDTH, HEADS, 1, HEAD_DIM, **options, rngs=nnx.Rngs(0))
    for name in ("qkv", "out", "norm", "sink"):
        if getattr(block, name) is not None:
            getattr(layer, name)[...] = getattr(block, name)[...]
    return block, layer


@pytest.mark.parametrize(
    "options", [{}, dict(norm=False), dict(sink=True)], ids=["", "no norm", "sink"]
)
def test_the_block_is_attention_of_one_key_head(options):
    block, layer = blocks(**options)
    x, table = draw(2, 5, WIDTH), tables(2, 5)
    _, key, value = layer.prefill(x[:, :3], *(t[:, :3] for t in table))
    cache = nn.LayerCache.zeros(2, 1, HEAD_DIM, 6, jnp.float32)
    cache = cache.write(key, value, jnp.zeros(2, jnp.int32))
    new = x[:, 3:], *(t[:, 3:] for t in table)
    held = jnp.full(2, 3, jnp.int32)
    got = jax.jit(lambda *args: block(*args))(*new, cache, held)
    wanted = layer.decode(*new, cache, held)
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_a_row_without_room_is_refused_or_keeps_its_cache():
    block, _ = blocks()
    cache = nn.LayerCache(draw(2, 1, HEAD_DIM, 4), draw(2, 1, 4, HEAD_DIM, seed=1))
    args = draw(2, 2, WIDTH), *tables(2, 2), cache
    lengths = jnp.array([1, 3], jnp.int32)
    wanted = r"nn.AttentionBlock: lengths must lie in \[0, 2\] so that 2 new tokens "
    with pytest.raises(ValueError, match=wanted + r"fit in 4 slots, got \[1, 3\]"):
        block(*args, lengths)
    _, kept = jax.jit(lambda *a: block(*a))(*args, lengths)
    np.testing.assert_array_equal(kept.value[1], cache.value[1])
    assert not np.array_equal(kept.value[0], cache.value[0])


def test_interleaved_pairs_are_other_pairs():
    (half, _), (pairs, _) = blocks(), blocks(interleaved=True)
    cache = nn.LayerCache(draw(2, 1, HEAD_DIM, 4), draw(2, 1, 4, HEAD_DIM, seed=1))
    args = draw(2, 1, WIDTH), *tables(2, 1, 3), cache, jnp.array([3, 3], jnp.int32)
    assert not np.allclose(half(*args)[0], pairs(*args)[0])
