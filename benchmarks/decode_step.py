"""One greedy decode step of a Llama of 135M parameters, batch 1, context 256.

The shapes are those of SmolLM2-135M with a tied embedding; the weights are random. Each
step writes its token to the cache's last slot, so that every step does the same work.
"""

import math
from collections.abc import Callable
from typing import Any

from benchmarks.workload import Case, Side, Target, Work, Workload, jax_compile

CASES = {
    "context256_float32": {
        "layers": 30,
        "d_model": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "d_ff": 1536,
        "vocab": 49152,
        "context": 256,
        "rope_theta": 1e4,
        "eps": 1e-5,
    }
}

HF_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _weight_shapes(case: Case) -> dict[str, tuple[int, int]]:
    """`[d_out, d_in]` of each projection of one layer, as PyTorch stores them."""
    q_width = case["num_heads"] * case["head_dim"]
    kv_width = case["num_kv_heads"] * case["head_dim"]
    d_model, d_ff = case["d_model"], case["d_ff"]
    return {
        "q": (q_width, d_model),
        "k": (kv_width, d_model),
        "v": (kv_width, d_model),
        "o": (d_model, q_width),
        "gate": (d_ff, d_model),
        "up": (d_ff, d_model),
        "down": (d_model, d_ff),
    }


def ideal(case: Case) -> dict[str, float]:
    """Reads every weight and the cache once."""
    layer = sum(math.prod(shape) for shape in _weight_shapes(case).values())
    weights = case["vocab"] * case["d_model"] + case["layers"] * layer
    cache = 2 * math.prod(_cache_shape(case))
    return {"flops": 2.0 * weights, "bytes": 4.0 * (weights + cache)}


def _cache_shape(case: Case) -> tuple[int, ...]:
    return (case["layers"], case["num_kv_heads"], case["context"], case["head_dim"])


def _inputs(case: Case) -> tuple[dict[str, Any], Any, Any, Any]:
    """Stacked weights `[layers, d_out, d_in]`, the embedding, key and value caches."""
    import numpy as np

    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(0.03)

    shapes = _weight_shapes(case)
    weights = {name: draw(case["layers"], *shape) for name, shape in shapes.items()}
    embedding = draw(case["vocab"], case["d_model"])
    return weights, embedding, draw(*_cache_shape(case)), draw(*_cache_shape(case))


def _jnp_layer(case: Case, x, weights, k_cache, v_cache, position):
    """One layer from the equations; `x` is `[1, d_model]`."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def project(name, x):
        return lax.dot_general(x, weights[name], (((1,), (1,)), ((), ())))

    heads = (-1, case["head_dim"])
    h = _rms(case, x)
    q = _rotate(case, project("q", h).reshape(heads), position)
    k = _rotate(case, project("k", h).reshape(heads), position)
    v = project("v", h).reshape(heads)
    k_cache = lax.dynamic_update_slice(k_cache, k[:, None], (0, position, 0))
    v_cache = lax.dynamic_update_slice(v_cache, v[:, None], (0, position, 0))
    grouped = q.reshape(case["num_kv_heads"], -1, case["head_dim"])
    scores = jnp.einsum("kgd,kcd->kgc", grouped, k_cache) * case["head_dim"] ** -0.5
    scores = jnp.where(jnp.arange(case["context"]) <= position, scores, -jnp.inf)
    mixed = jnp.einsum("kgc,kcd->kgd", jax.nn.softmax(scores, -1), v_cache)
    x = x + project("o", mixed.reshape(1, -1))
    h = _rms(case, x)
    x = x + project("down", jax.nn.silu(project("gate", h)) * project("up", h))
    return x, k_cache, v_cache


def _rms(case: Case, x):
    from jax import lax

    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + case["eps"])


def _rotate(case: Case, x, position):
    import jax.numpy as jnp

    half = case["head_dim"] // 2
    angles = position * case["rope_theta"] ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _jnp_scan(case: Case, weights, x, k_cache, v_cache, position):
    from jax import lax

    def body(x, layer):
        x, k, v = _jnp_layer(case, x, *layer, position)
        return x, (k, v)

    x, (k_cache, v_cache) = lax.scan(body, x, (weights, k_cache, v_cache))
    return x, k_cache, v_cache


def _jnp_unrolled(case: Case, weights, x, k_cache, v_cache, position):
    """Weights are a list of layers: slices of stacked weights would be copied."""
    for i, layer in enumerate(weights):
        x, k, v = _jnp_layer(case, x, layer, k_cache[i], v_cache[i], position)
        k_cache, v_cache = k_cache.at[i].set(k), v_cache.at[i].set(v)
    return x, k_cache, v_cache


def _jnp(layers: Callable, *, stacked: bool) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax
        import jax.numpy as jnp
        from jax import lax

        weights, embedding, k_cache, v_cache = jax.tree.map(jnp.array, _inputs(case))
        if not stacked:
            unstack = range(case["layers"])
            weights = [{n: w[i] + 0 for n, w in weights.items()} for i in unstack]

        def step(weights, embedding, k_cache, v_cache, token, position):
            x = embedding[token][None]
            x, k_cache, v_cache = layers(case, weights, x, k_cache, v_cache, position)
            dimensions = (((1,), (1,)), ((), ()))
            logits = lax.dot_general(_rms(case, x), embedding, dimensions)
            return jnp.argmax(logits, -1), logits, k_cache, v_cache

        token, position = jnp.int32(7), jnp.int32(case["context"] - 1)
        jitted = jax.jit(step, donate_argnums=(2, 3))
        args = (weights, embedding, k_cache, v_cache, token, position)
        compiled, facts = jax_compile(jitted, *args)
        cache = [k_cache, v_cache]

        def run():
            token_out, logits, *cache[:] = compiled(
                weights, embedding, *cache, token, position
            )
            jax.block_until_ready(token_out)
            return logits

        return Work(run, facts=facts)

    return build


def _torch(case: Case) -> Work:
    import torch

    weights, embedding, k_cache, v_cache = _inputs(case)
    layers = [
        {name: torch.from_numpy(w[i]) for name, w in weights.items()}
        for i in range(case["layers"])
    ]
    table = torch.from_numpy(embedding)
    caches = torch.from_numpy(k_cache), torch.from_numpy(v_cache)

    def run():
        with torch.no_grad():
            return _torch_step(case, layers, table, *caches)

    return Work(run)


def _torch_step(case: Case, layers, table, k_cache, v_cache):
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention, silu

    position, half = case["context"] - 1, case["head_dim"] // 2
    angles = position * case["rope_theta"] ** (-torch.arange(half) / half)
    sin, cos = torch.sin(angles), torch.cos(angles)

    def rms(x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + case["eps"])

    def rotate(x):
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = table[7][None]
    for i, layer in enumerate(layers):
        h = rms(x)
        q, k, v = (
            linear(h, layer[n]).view(1, -1, 1, case["head_dim"])
            for n in ("q", "k", "v")
        )
        k_cache[i, :, position] = rotate(k)[0, :, 0]
        v_cache[i, :, position] = v[0, :, 0]
        mixed = scaled_dot_product_attention(
            rotate(q), k_cache[i][None], v_cache[i][None], enable_gqa=True
        )
        x = x + linear(mixed.reshape(1, -1), layer["o"])
        h = rms(x)
        hidden = silu(linear(h, layer["gate"])) * linear(h, layer["up"])
        x = x + linear(hidden, layer["down"])
    logits = linear(rms(x), table)
    logits.argmax(-1)
    return logits


def neuronjax_step(
    *, scan: bool, dtype: str = "float32", mode: str | None = None
) -> Callable[[Case], Work]:
    """`models.Llama.decode`, the cache donated, its length kept for every step.

    `mode` is one of `neuronjax.quantize`.
    """

    def build(case: Case) -> Work:
        from neuronjax.models.cache import Cache

        model, layers = _llama(case, dtype)
        if mode is not None:
            model = _quantized(model, mode)
        if scan:
            model, layers = model.stacked(), _stack(layers)
        return _step(case, model, layers, Cache)

    return build


def transformer_tkg_step(
    *, scan: bool, tensor: int = 1, lnc: int = 1
) -> Callable[[Case], Work]:
    """The same step by `transformer_tkg`, on a mesh of `tensor * lnc` devices."""

    def build(case: Case) -> Work:
        import jax.numpy as jnp

        from neuronjax.models.mesh_decoder import MeshCache, MeshDecoder
        from neuronjax.nn.cache import LayerCache
        from neuronjax.sharding import make_mesh

        model, layers = _llama(case, "float32")
        mesh = make_mesh(tensor=tensor, lnc=lnc)
        decoder = MeshDecoder(model, mesh, scan_layers=scan)
        # Its cache has a slot to spare.
        layers = tuple(
            LayerCache(
                jnp.pad(layer.key, ((0, 0),) * 3 + ((0, 1),)),
                jnp.pad(layer.value, ((0, 0),) * 2 + ((0, 1), (0, 0))),
            )
            for layer in layers
        )
        layers = _stack(layers) if scan else layers
        if mesh.size > 1:
            layers = _placed(decoder, layers, case["context"])
        return _step(case, decoder, layers, MeshCache)

    return build


def _placed(decoder: Any, layers: Any, slots: int) -> Any:
    """Caches laid over the devices as those that `decoder` makes."""
    import jax
    import jax.numpy as jnp

    one = jnp.ones((1, 1), jnp.int32)
    _, like = decoder.prefill(one, one[0], slots)
    return jax.device_put(layers, jax.tree.map(lambda x: x.sharding, like.layers))


def _stack(layers: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers)


def _step(case: Case, model: Any, layers: Any, cache_type: Callable) -> Work:
    """One step of `model`, whose caches are `layers`."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    graph, state = nnx.split(model)
    lengths = jnp.array([case["context"] - 1], jnp.int32)
    token = jnp.array([[7]], jnp.int32)

    def step(state, lengths, layers):
        cache = cache_type(layers, lengths)
        logits, cache = nnx.merge(graph, state).decode(token, cache)
        return jnp.argmax(logits, -1), logits[0], cache.layers

    jitted = jax.jit(step, donate_argnums=2)
    compiled, facts = jax_compile(jitted, state, lengths, layers)
    facts["stored_mb"] = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6
    held = [layers]

    def run():
        token_out, logits, held[0] = compiled(state, lengths, held[0])
        jax.block_until_ready(token_out)
        return logits

    return Work(run, facts=facts)


def _quantized(model: Any, mode: str) -> Any:
    import jax.numpy as jnp

    import neuronjax

    static = mode == "static-fp8"
    tokens = jnp.arange(256, dtype=jnp.int32)[None]
    return neuronjax.quantize(model, mode, calibration=[tokens] if static else None)


def _llama(case: Case, dtype: str) -> tuple[Any, Any]:
    """The model with the same weights, its layers a list, and their caches."""
    import jax.numpy as jnp
    import numpy as np

    from neuronjax.models.config import LlamaConfig
    from neuronjax.models.load import load_llama
    from neuronjax.nn.cache import LayerCache

    sizes = {n: case[n] for n in LlamaConfig.__dataclass_fields__ if n in case}
    config = LlamaConfig(
        vocab_size=case["vocab"],
        num_layers=case["layers"],
        norm_eps=case["eps"],
        tie_embeddings=True,
        **sizes,
    )
    weights, embedding, k_cache, v_cache = _inputs(case)
    ones = np.ones(case["d_model"], np.float32)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones}
    for i in range(case["layers"]):
        prefix = f"model.layers.{i}."
        tensors |= {f"{prefix}{HF_NAMES[n]}.weight": w[i] for n, w in weights.items()}
        tensors[f"{prefix}input_layernorm.weight"] = ones
        tensors[f"{prefix}post_attention_layernorm.weight"] = ones
    model = load_llama(config, tensors, dtype)
    keys, values = k_cache[:, None].swapaxes(3, 4), v_cache[:, None]
    rows = range(case["layers"])
    return model, tuple(
        LayerCache(jnp.array(keys[i], dtype), jnp.array(values[i], dtype)) for i in rows
    )


WORKLOAD = Workload(
    name="decode_step",
    title="Decode step of a 135M Llama",
    cases=CASES,
    sides={
        "torch_eager": Side(_torch, "torch"),
        "jnp_scan": Side(_jnp(_jnp_scan, stacked=True)),
        "jnp_unrolled": Side(_jnp(_jnp_unrolled, stacked=False)),
        "neuronjax_scan": Side(neuronjax_step(scan=True)),
        "neuronjax_unrolled": Side(neuronjax_step(scan=False)),
        "transformer_tkg_scan": Side(transformer_tkg_step(scan=True)),
        "transformer_tkg_unrolled": Side(transformer_tkg_step(scan=False)),
    },
    ideal=ideal,
    targets=(
        Target("neuronjax_scan", "*", "ms", 0.5, "torch_eager"),
        Target("neuronjax_scan", "*", "compile_s", 0.7),
        Target("neuronjax_unrolled", "*", "compile_s", 4.0),
        Target("transformer_tkg_scan", "*", "compile_s", 0.7),
        Target("transformer_tkg_unrolled", "*", "compile_s", 4.0),
    ),
)
