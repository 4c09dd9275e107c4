"""The decoder of experts: training, generation, configurations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import neuronjax
from neuronjax.models import MoEConfig, MoELM
from neuronjax.sharding import make_mesh, place
from tests.hlo import collectives
from tests.plain_llama import _attend, _heads, _norm, _turn
from tests.plain_moe import plain_affinities, plain_experts

SMALL = dict(
    vocab_size=23,
    d_model=8,
    d_ff=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_seq=200,
)
CONFIGS = {
    "mixtral": MoEConfig.mixtral(**SMALL, num_experts=4),
    "qwen3": MoEConfig.qwen3_moe(**SMALL, num_experts=12, experts_per_token=3),
    "shared": MoEConfig(
        **SMALL,
        num_experts=4,
        experts_per_token=1,
        shared_d_ff=5,
        norm_topk_prob=False,
        tie_embeddings=True,
    ),
}
TOKENS = jax.random.randint(jax.random.key(0), (2, 4), 0, SMALL["vocab_size"])


def model_of(name, **options):
    return MoELM(CONFIGS[name], **options, rngs=nnx.Rngs(3))


def arrays_of(tree):
    return nnx.to_pure_dict(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)


def plain_layer(config, layer, x, angles):
    """One layer of the dense formula: `x`, its balance loss, who has tokens."""
    at, moe = layer["attention"], layer["mlp"]
    h = _norm(x, at["norm"], config.norm_eps)
    width = config.num_heads * config.head_dim
    ends = [width, width + config.num_kv_heads * config.head_dim]
    q, k, v = (_heads(t, config.head_dim) for t in jnp.split(h @ at["qkv"], ends, -1))
    x = x + _attend(_turn(q, angles), _turn(k, angles), v) @ at["out"]
    rows = _norm(x, moe["norm"], config.norm_eps).reshape(-1, config.d_model)
    logits, count = rows @ moe["router"], config.experts_per_token
    affinities = plain_affinities(logits, count, normalize=config.norm_topk_prob)
    out = plain_experts(rows, affinities, moe["gate_up"], moe["down"])
    if "shared" in moe:
        gate = rows @ moe["shared"]["gate"]
        middle = gate / (1 + jnp.exp(-gate)) * (rows @ moe["shared"]["up"])
        out = out + middle @ moe["shared"]["down"]
    chosen = affinities > 0
    share = jax.nn.softmax(logits, -1).mean(0)
    load = chosen.sum(0, dtype=x.dtype) / (rows.shape[0] * count)
    return x + out.reshape(x.shape), len(share) * (share * load).sum(), chosen.any(0)


def plain_lm(config, state, tokens):
    """Logits, the mean balance loss, and which experts have tokens in each layer."""
    x = state["embedding"][tokens]
    pairs = jnp.arange(0.0, config.head_dim, 2, dtype=x.dtype) / config.head_dim
    places = jnp.arange(tokens.shape[1], dtype=x.dtype)
    angles = places[:, None] * config.rope_theta**-pairs
    losses, busy = [], []
    for i in range(config.num_layers):
        x, loss, has_tokens = plain_layer(config, state["layers"][i], x, angles)
        losses.append(loss)
        busy.append(has_tokens)
    head = state["embedding" if config.tie_embeddings else "head"]
    logits = _norm(x, state["norm"]["scale"], config.norm_eps) @ head.T
    return logits, sum(losses) / len(losses), jnp.stack(busy)


def objective(logits, balance, tokens):
    log_p = jax.nn.log_softmax(logits[:, :-1].astype(balance.dtype), -1)
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)
    return -picked.mean() + 0.01 * balance


def wide(state):
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), state)


def plain_gradients(config):
    """The dense formula's loss, gradients and busy experts, in float64."""

    def total(state, tokens):
        logits, balance, busy = plain_lm(config, state, tokens)
        return objective(logits, balance, tokens), (logits, busy)

    run = jax.jit(jax.value_and_grad(total, has_aux=True))

    def of(model):
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, run(wide(arrays_of(model)), TOKENS))

    return of


@nnx.jit
def step_gradients(model):
    def total(model):
        logits, balance = model.with_balance(TOKENS)
        return objective(logits, balance, TOKENS), logits

    return nnx.value_and_grad(total, has_aux=True)(model)


def check_gradients(grads, wanted, busy):
    """Every parameter's gradient; those of experts without tokens are exactly 0."""
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
    ):
        scale = np.abs(y).max()
        np.testing.assert_allclose(
            x, y, rtol=1e-4, atol=2e-5 * scale, err_msg=str(path)
        )
    for i in grads["layers"]:
        for name in ("gate_up", "down"):
            each, plain = (g["layers"][i]["mlp"][name] for g in (grads, wanted))
            for e, has_tokens in enumerate(busy[i]):
                # Tokens at the last position alone have no part in the loss.
                assert np.any(each[e]) == np.any(plain[e]) <= has_tokens, (i, name, e)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_training_with_every_experts_gradient_checked(name):
    model, plain = model_of(name), plain_gradients(CONFIGS[name])
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)

    @nnx.jit
    def update(optimizer, model, grads):
        with jax.numpy_dtype_promotion("standard"):  # optax promotes its step count
            optimizer.update(model, grads)

    losses, idle = [], 0
    for step in range(12):
        (loss, logits), grads = step_gradients(model)
        if step % 4 == 0:
            (wanted, (plain_logits, busy)), plain_grads = plain(model)
            np.testing.assert_allclose(logits, plain_logits, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(loss, wanted, rtol=1e-5)
            check_gradients(arrays_of(grads), plain_grads, busy)
            idle += int((~busy).sum())
        losses.append(float(loss))
        update(optimizer, model, grads)
    assert losses[-1] < 0.8 * losses[0]
    assert idle or name != "qwen3", "every expert had tokens: nothing was idle"


def test_a_scan_over_layers_is_the_list_of_layers():
    model = model_of("qwen3")
    stacked = model.stacked()
    for x, y in zip(
        model.with_balance(TOKENS), stacked.with_balance(TOKENS), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stacked(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-6)
    fresh = model_of("mixtral", scan_layers=True)
    assert fresh.unstacked()(TOKENS).shape == (2, 4, 23)


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
def test_decoding_one_by_one_gives_what_a_whole_sequence_gives(scan):
    model = model_of("qwen3", scan_layers=scan)
    wanted = model(TOKENS)
    _, cache = model.prefill(TOKENS[:, :2], jnp.array([2, 2], jnp.int32), 8)
    for t in (2, 3):
        got, cache = model.decode(TOKENS[:, t : t + 1], cache)
        np.testing.assert_allclose(got[:, 0], wanted[:, t], rtol=1e-4, atol=1e-5)


def test_what_a_config_says_reaches_the_experts():
    more = dict(activation="GELU", block_size=3, checkpoint="recompute")
    config = dataclasses.replace(CONFIGS["mixtral"], act_fn="SIGMOID", **more)
    model = MoELM(config, rngs=nnx.Rngs(0))
    assert all(layer.mlp.act_fn == "SIGMOID" for layer in model.layers)
    graph, state = nnx.split(model)
    loss = lambda state: nnx.merge(graph, state)(TOKENS).sum()  # noqa: E731
    rows = {row.name: row for row in neuronjax.trace(jax.grad(loss), state).rows}
    for name in ("BlockwiseMM", "BlockwiseMMBwd"):
        assert rows[name].count == 2
        assert more.items() <= dict(rows[name].config).items()


def test_over_a_mesh_it_is_the_model_of_one_device():
    mesh = make_mesh(data=2, expert=2)
    model, one = model_of("qwen3", mesh=mesh, batch="data"), model_of("qwen3")
    place(model, mesh)
    graph, state = nnx.split(model)
    run = lambda state: nnx.merge(graph, state).with_balance(TOKENS)  # noqa: E731
    for x, y in zip(jax.jit(run)(state), one.with_balance(TOKENS), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert collectives(run, state)["all-to-all"] == 2 * model.config.num_layers


def test_greedy_generation_is_the_argmax_of_the_logits():
    model, prompt = model_of("mixtral"), [5, 9, 11]
    made, other = model.generate([prompt, [2]], max_tokens=4, eos_ids=())
    assert len(made) == len(other) == 4
    # The decoder is causal: one call has the logits of every prefix.
    logits = nnx.jit(lambda model, x: model(x))(model, jnp.array([prompt + made]))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == made


def test_a_model_traces_to_macros():
    model = model_of("shared")
    lengths = jnp.array([4, 4], jnp.int32)
    _, cache = jax.eval_shape(lambda: model.prefill(TOKENS, lengths, 8))
    whole = jax.make_jaxpr(lambda t: model(t))(TOKENS)
    step = jax.make_jaxpr(lambda t, c: model.decode(t, c))(TOKENS[:, :1], cache)
    for jaxpr, experts in ((whole, "BlockwiseMM"), (step, "ExpertMLPs")):
        text = str(jaxpr)
        for name in (experts, "RouterTopK", "MLP", "QKV"):
            assert text.count(f"name={name}") == 2, name


def test_the_published_sizes():
    mixtral, qwen3 = MoEConfig.mixtral(), MoEConfig.qwen3_moe()
    # Weights of the experts: 3 matrices each; 45.1 of 46.7 and 29.0 of 30.5 billion.
    for config, billions in ((mixtral, 45.1), (qwen3, 29.0)):
        each = 3 * config.d_model * config.d_ff
        total = each * config.num_experts * config.num_layers
        assert round(total / 1e9, 1) == billions
    assert mixtral.norm_topk_prob and qwen3.norm_topk_prob


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(experts_per_token=9), "experts_per_token must lie between 1 and"),
        (dict(experts_per_token=0), "experts_per_token must lie between 1 and"),
        (dict(shared_d_ff=-1), "shared_d_ff must be at least 0, got -1"),
        (dict(num_heads=3), "num_heads must be a multiple of num_kv_heads"),
    ],
    ids=str,
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=f"MoEConfig: {message}"):
        dataclasses.replace(MoEConfig.mixtral(), **change)
