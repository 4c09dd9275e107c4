"""A step of a decoder over a mesh holds its donated cache once."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from neuronjax.models import Llama, LlamaConfig, MeshDecoder
from neuronjax.models.cache import Cache
from neuronjax.models.mesh_decoder import SPARE, MeshCache
from neuronjax.sharding import make_mesh

CONFIG = LlamaConfig(
    vocab_size=15,
    d_model=8,
    d_ff=6,
    num_layers=8,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,
    max_seq=8192,
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_step_copies_no_donated_cache(heads, batch, dtype):
    """What it reads of one layer lies beside the cache of all eight, nothing more.

    With one key head a rank and with two.
    """
    sizes = dict(num_kv_heads=3 * heads, num_heads=6 * heads)
    config = dataclasses.replace(CONFIG, **sizes)
    model, mesh = Llama(config, dtype=dtype, rngs=nnx.Rngs(0)), make_mesh(tensor=3)
    graph, state = nnx.split(MeshDecoder(model, mesh))
    empty = Cache.zeros(config, batch, 4095 + SPARE, dtype=dtype, stacked=True)
    layers = jax.device_put(empty.layers, NamedSharding(mesh, P(None, None, "tensor")))
    tokens, cache = jnp.ones((batch, 1), jnp.int32), MeshCache(layers, empty.lengths)
    step = jax.jit(lambda s, t, c: nnx.merge(graph, s).decode(t, c), donate_argnums=2)
    memory = step.lower(state, tokens, cache).compile().memory_analysis()
    held = jax.tree.leaves(layers)
    size = sum(x.addressable_shards[0].data.nbytes for x in held)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 3
