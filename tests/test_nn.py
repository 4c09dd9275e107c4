"""NNX layers: twins of the functions, and ordinary modules."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax import nn
from neuronjax.models.config import LlamaConfig
from neuronjax.models.llama import Llama

SIZES = dict(d_model=32, d_ff=48, num_heads=4, num_kv_heads=2, head_dim=8)
CONFIG = LlamaConfig(vocab_size=50, num_layers=2, **SIZES, max_seq=64)


def _layer(dtype=None):
    return nn.DecoderLayer(**SIZES, dtype=dtype, rngs=nnx.Rngs(0))


def _inputs(batch=2, seq=5, start=0):
    x = jax.random.normal(jax.random.key(1), (batch, seq, SIZES["d_model"]))
    positions = jnp.broadcast_to(start + jnp.arange(seq), (batch, seq))
    return x, *nn.rotary_tables(positions, SIZES["head_dim"])


def test_mlp_is_the_twin_of_the_function():
    layer, x = nn.MLP(32, 48, rngs=nnx.Rngs(0)), _inputs()[0]
    (wanted,) = neuronjax.mlp(
        x,
        layer.gate[...],
        layer.up[...],
        layer.down[...],
        normalization_weights_tensor=layer.norm[...][None],
        normalization_type="RMS_NORM",
    )
    np.testing.assert_array_equal(layer(x), wanted)
    np.testing.assert_allclose(layer(x, residual=x), wanted + x, rtol=1e-5, atol=1e-6)


def test_rms_norm_is_the_twin_of_the_function():
    layer, x = nn.RMSNorm(32, rngs=nnx.Rngs(0)), _inputs()[0]
    np.testing.assert_array_equal(layer(x), neuronjax.rms_norm(x, layer.scale[...]))


def test_attention_is_the_twin_of_the_functions():
    layer = nn.Attention(32, 4, 2, 8, rngs=nnx.Rngs(0))
    x, cos, sin = _inputs()
    fused = neuronjax.qkv(
        x,
        layer.qkv[...],
        fused_norm_type="RMS_NORM",
        gamma_norm_weights=layer.norm[...][None],
        fused_rope=True,
        cos_cache=cos,
        sin_cache=sin,
        d_head=8,
        num_q_heads=4,
        num_kv_heads=2,
    )
    heads = fused.reshape(2, 5, 8, 8).swapaxes(1, 2)
    q, k, v = (t.reshape(-1, 5, 8) for t in jnp.split(heads, [4, 6], 1))
    out = neuronjax.attention_cte(q, k, v, scale=8**-0.5, tp_k=True, tp_out=True)
    wanted = neuronjax.output_projection_cte(out.reshape(2, 4, 8, 5), layer.out[...])
    np.testing.assert_allclose(layer(x, cos, sin), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", range(1, 8))
def test_decoding_equals_prefill_at_every_position(split):
    """R-14: decode is row `split` of a full prefill, the last slot included."""
    layer = nn.Attention(32, 4, 2, 8, rngs=nnx.Rngs(0))
    x, cos, sin = _inputs(seq=8)
    wanted, key, value = layer.prefill(x, cos, sin)
    cache = nn.LayerCache.zeros(2, 2, 8, 8, jnp.float32)
    start = jnp.zeros(2, jnp.int32)
    cache = cache.write(key[:, :, :split], value[:, :, :split], start)
    for t in range(split, 8):
        one = (a[:, t : t + 1] for a in (x, cos, sin))
        lengths = jnp.full(2, t, jnp.int32)
        got, cache = layer.decode(*one, cache, lengths)
        np.testing.assert_allclose(got[:, 0], wanted[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cache.value, value, rtol=1e-5, atol=1e-6)


def test_a_write_past_the_end_is_refused_or_dropped():
    """R-15."""
    cache = jnp.array([[10.0, 20.0, 30.0, 40.0]])
    for position, new in ((5, [[99.0]]), (3, [[98.0, 99.0]]), (-1, [[99.0]])):
        new, position = jnp.array(new), jnp.array([position])
        with pytest.raises(ValueError, match="write_cache: position must lie in"):
            nn.write_cache(cache, new, position)
        kept = jax.jit(nn.write_cache)(cache, new, position)
        np.testing.assert_array_equal(kept, cache)
    rows = jnp.concatenate([cache, cache])
    new, position = jnp.array([[98.0, 99.0]] * 2), jnp.array([3, 1])
    got = jax.jit(nn.write_cache)(rows, new, position)
    np.testing.assert_array_equal(got, [[10, 20, 30, 40], [10, 98, 99, 40]])


def test_a_position_that_is_a_constant_of_the_jitted_function_is_checked():
    cache, new = jnp.zeros((1, 4)), jnp.ones((1, 1))
    for position, fits in ((3, True), (4, False)):
        held = jnp.array([position])
        write = jax.jit(lambda c, n, held=held: nn.write_cache(c, n, held))
        if fits:
            np.testing.assert_array_equal(write(cache, new), [[0, 0, 0, 1]])
        else:
            with pytest.raises(ValueError, match="write_cache: position must lie in"):
                write(cache, new)


def test_cache_shapes_that_do_not_fit_are_refused():
    cache = jnp.zeros((2, 4, 3))
    with pytest.raises(ValueError, match="new and position must have shapes"):
        nn.write_cache(cache, jnp.zeros((2, 1, 2)), jnp.zeros(2, jnp.int32))


def test_parameters_carry_partition_names():
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(_layer())))
    assert specs["attention"]["qkv"] == P(None, "tensor")
    assert specs["attention"]["out"] == P("tensor", None)
    assert specs["mlp"]["down"] == P("tensor", None)
    stacked = Llama(CONFIG, scan_layers=True, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(stacked)))
    assert specs["layers"]["mlp"]["gate"] == P(None, None, "tensor")


def test_split_and_merge_and_jit_agree():
    layer, args = _layer(), _inputs()
    graph, state = nnx.split(layer)
    wanted = layer(*args)
    chex.assert_trees_all_close(nnx.merge(graph, state)(*args), wanted)
    jitted = nnx.jit(lambda m, *a: m(*a))(layer, *args)
    chex.assert_trees_all_close(jitted, wanted, rtol=1e-5, atol=1e-6)


def test_bfloat16_computation_keeps_float32_parameters():
    layer = _layer(dtype=jnp.bfloat16)
    assert layer(*_inputs()).dtype == jnp.bfloat16
    grads = nnx.grad(lambda m: m(*_inputs()).astype(jnp.float32).sum())(layer)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_model_trains_with_an_nnx_optimizer(scan_layers):
    model = Llama(CONFIG, scan_layers=scan_layers, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens = jnp.tile(jnp.arange(10), (2, 2))

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = model(tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            ).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        with jax.numpy_dtype_promotion("standard"):  # optax promotes its step count
            optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_layer_runs_on_a_mesh_of_either_kind(kind):
    """R-50 (a), (b): under jit on an Auto and on an Explicit mesh."""
    layer, args = _layer(), _inputs(batch=4)
    wanted = layer(*args)
    mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])
    graph, state = nnx.split(layer)
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, NamedSharding(mesh, P("data"))) for a in args]
        got = jax.jit(lambda s, *a: nnx.merge(graph, s)(*a))(state, *split)
    if kind is AxisType.Explicit:
        assert jax.typeof(got).sharding.spec[0] == "data"
    np.testing.assert_allclose(jax.device_get(got), wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_runs_inside_shard_map_over_the_batch():
    """R-50 (c), R-43: gradients of replicated weights are summed over devices."""
    layer, args = _layer(), _inputs(batch=4)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    graph, state = nnx.split(layer)

    def apply(state, *a):
        return nnx.merge(graph, state)(*a)

    sharded = jax.shard_map(
        apply, mesh=mesh, in_specs=(P(), *[P("data")] * 3), out_specs=P("data")
    )
    got = jax.jit(jax.grad(lambda s: jnp.sin(sharded(s, *args)).sum()))(state)
    wanted = jax.jit(jax.grad(lambda s: jnp.sin(apply(s, *args)).sum()))(state)
    chex.assert_trees_all_close(got, wanted, rtol=2e-4, atol=1e-5)


def test_weights_split_over_a_tensor_axis_give_the_same():
    """The partition names drive an Auto mesh: heads and d_ff over two devices."""
    model = Llama(CONFIG, rngs=nnx.Rngs(0))
    tokens = jnp.arange(12).reshape(2, 6)
    wanted = model(tokens)
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    graph, state = nnx.split(model)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        nnx.to_pure_dict(state),
        nnx.to_pure_dict(nnx.get_partition_spec(state)),
    )
    nnx.replace_by_pure_dict(state, placed)
    got = jax.jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_plain_mode_bisects_a_model():
    model, tokens = Llama(CONFIG, rngs=nnx.Rngs(0)), jnp.arange(12).reshape(2, 6)
    wanted = model(tokens)
    with neuronjax.plain():
        assert neuronjax.trace(model, tokens).names == ()
        np.testing.assert_allclose(model(tokens), wanted, rtol=1e-4, atol=1e-4)
