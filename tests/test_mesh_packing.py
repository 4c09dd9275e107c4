"""Weights in the layout of a decode transformer: what a rank and its cores hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.models import Llama, LlamaConfig, MoEConfig, MoELM
from neuronjax.models import mesh_packing as packing
from neuronjax.nn.cache import LayerCache
from neuronjax.nn.rotary import rotary_tables
from neuronjax.sharding import make_mesh

CONFIG = LlamaConfig(
    vocab_size=12,
    d_model=8,
    d_ff=10,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
)


def parts_of(w, name, ranks, cores):
    """The weight of each core of each rank, cut by hand: `[rank][core]`."""
    places = {None: 0, packing.RANKS: 1, packing.CORES: 2, packing.BOTH: 3}
    held = []
    for rank in range(ranks):
        held.append([])
        for core in range(cores):
            own = np.asarray(w)
            for axis, split in zip((-2, -1), packing.SPLIT[name], strict=True):
                count = (1, ranks, cores, ranks * cores)[places[split]]
                index = (0, rank, core, rank * cores + core)[places[split]]
                own = np.split(own, count, axis)[index]
            held[-1].append(own)
    return held


@pytest.mark.parametrize("kind", [np, jnp])
def test_each_key_head_has_its_query_heads_in_front(kind):
    """Columns hold their head's number: 6 query, 3 key, 3 value heads of 2 columns."""
    row = kind.repeat(kind.arange(12), 2)
    got = packing.by_key_head(kind.stack([row, 100 + row]), 6, 3)
    wanted = np.repeat([0, 1, 6, 9, 2, 3, 7, 10, 4, 5, 8, 11], 2)
    np.testing.assert_array_equal(got, [wanted, 100 + wanted])
    assert isinstance(got, np.ndarray if kind is np else jax.Array)


@pytest.mark.parametrize(
    ("columns", "heads"), [(23, (6, 3)), (24, (5, 3)), (24, (6, 0))]
)
def test_columns_that_are_no_heads_are_refused(columns, heads):
    with pytest.raises(ValueError, match="by_key_head: the columns of qkv must be"):
        packing.by_key_head(np.ones((2, columns)), *heads)


def test_more_columns_of_zeros_are_the_same_mlp():
    layer = Llama(CONFIG, rngs=nnx.Rngs(0)).layers[0]
    packed = packing.packed_layer(layer, 6)
    assert packed["W_gate"].shape == (8, 12) and packed["W_down"].shape == (12, 8)
    x = jax.random.normal(jax.random.key(0), (1, 3, 8))
    norm = dict(
        normalization_weights_tensor=packed["W_gamma_mlp"],
        normalization_type="RMS_NORM",
        eps=CONFIG.norm_eps,
    )
    weights = (packed[name] for name in ("W_gate", "W_up", "W_down"))
    (got,) = neuronjax.mlp(x, *weights, **norm)
    np.testing.assert_allclose(got, layer.mlp(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("cores", [1, 2])
def test_the_ranks_own_heads_sum_to_the_layer_s_attention(ranks, cores):
    """Each key head by the decode block, ranks added, cores side by side."""
    layer = Llama(CONFIG, rngs=nnx.Rngs(0)).layers[0]
    packed = packing.packed_layer(layer, ranks * cores)
    rng = np.random.default_rng(0)
    x, key, value = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 2, 8), (2, 3, 4, 7), (2, 3, 7, 4))
    )
    lengths = jnp.array([3, 5], jnp.int32)
    positions = lengths[:, None] + jnp.arange(2, dtype=jnp.int32)
    cos, sin = rotary_tables(positions, 4)
    wanted, _ = layer.attention.decode(x, cos, sin, LayerCache(key, value), lengths)
    slot = np.arange(5)[:, None] < np.asarray(lengths)
    mask = np.zeros((7, 2, 2, 2), bool)
    mask[:5] = slot[:, :, None, None]
    mask[5:] = np.triu(np.ones((2, 2), bool))[:, None, None]
    turn = dict(
        cos=cos[..., :2].transpose(2, 0, 1), sin=sin[..., :2].transpose(2, 0, 1)
    )
    held = {name: parts_of(packed[name], name, ranks, cores) for name in packed}
    total = np.zeros((4, 8))
    for rank in range(ranks):
        for core in range(cores):
            own = {name: jnp.asarray(held[name][rank][core]) for name in held}
            part = _block(own, x, key, value, rank, mask, turn)
            width = part.shape[1]
            total[:, core * width : (core + 1) * width] += part
    np.testing.assert_allclose(total.reshape(2, 2, 8), wanted, rtol=1e-5, atol=1e-5)


def _block(own, x, key, value, rank, mask, turn):
    """The part of a core: one call of the decode block for each of its key heads."""
    heads, total = own["W_qkv"].shape[1] // 16, 0.0
    for i in range(heads):
        head = slice(rank * heads + i, rank * heads + i + 1)
        out, *_ = neuronjax.attention_block_tkg(
            x,
            rmsnorm_X_enabled=True,
            rmsnorm_X_eps=CONFIG.norm_eps,
            rmsnorm_X_gamma=own["W_gamma_qkv"],
            W_qkv=own["W_qkv"][:, 16 * i : 16 * (i + 1)],
            **turn,
            K_cache_transposed=True,
            K_cache=key[:, head],
            V_cache=value[:, head],
            attention_mask=jnp.asarray(mask),
            update_cache=False,
        )
        rows = np.asarray(out).transpose(0, 3, 1, 2).reshape(4, 8)
        total = total + rows @ own["W_out"][8 * i : 8 * (i + 1)]
    return total


def test_weights_lie_as_the_ranks_and_cores_divide_them():
    spec = packing.weight_spec
    assert spec("W_qkv", 3, "t", "c") == P(None, None, "t")
    assert spec("W_out", 2, "t", "c") == P("t", "c")
    assert spec("W_down", 3, "t", "c") == P(None, ("t", "c"), None)
    assert spec("W_down", 2, "t", None) == P("t", None)
    assert spec("expert_gate_up", 5, "t", "c") == P(*(None,) * 4, ("t", "c"))
    assert spec("router", 3, "t", "c") == P(None, None, None)


def test_the_table_is_divided_as_far_as_it_divides():
    mesh = make_mesh(tensor=3, lnc=2)
    cases = {12: ("tensor", "lnc"), 15: ("tensor",), 16: ()}
    for vocab, axes in cases.items():
        assert packing.table_axes(mesh, vocab, "tensor", "lnc") == axes


def test_experts_are_packed_column_by_column():
    sizes = dataclasses.asdict(CONFIG) | dict(num_experts=4, experts_per_token=2)
    layer = MoELM(MoEConfig(**sizes, shared_d_ff=3), rngs=nnx.Rngs(0)).layers[0]
    packed = packing.packed_layer(layer, 4)
    shapes = {name: w.shape for name, w in packed.items()}
    assert shapes["expert_gate_up"] == (4, 8, 2, 12)
    assert shapes["expert_down"] == (4, 12, 8)
    assert shapes["router"] == (8, 4)
    assert shapes["W_gate"] == (8, 4) and shapes["W_down"] == (4, 8)
    assert not np.any(packed["expert_down"][:, 10:])


def test_all_weights_have_a_place():
    for model in (
        Llama(CONFIG, rngs=nnx.Rngs(0)),
        MoELM(
            MoEConfig(
                **dataclasses.asdict(CONFIG),
                num_experts=2,
                experts_per_token=1,
                shared_d_ff=2,
            ),
            rngs=nnx.Rngs(0),
        ),
    ):
        layer = model.layers[0]
        packed = packing.packed_layer(layer, 1)
        assert packed.keys() <= packing.SPLIT.keys()
        held = sum(x.size for x in jax.tree.leaves(nnx.state(layer)))
        assert sum(w.size for w in packed.values()) == held
