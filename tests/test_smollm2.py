"""SmolLM2-135M-Instruct against reference logits, and against plain jax.numpy."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import neuronjax
from neuronjax.models.checkpoint import read_checkpoint
from neuronjax.models.generation import GRAIN
from neuronjax.models.load import load_llama
from neuronjax.models.tokenizer import Tokenizer
from tests.plain_llama import plain_llama, plain_loss

FOLDER = pathlib.Path(__file__).parent / "cases" / "smollm2"
CASES = json.loads((FOLDER / "index.json").read_text())
MORE_PROMPTS = (
    "The largest planet in the solar system is",
    "import numpy as np\n\ndef mean(x):\n    ",
    "Q: What is 7 times 8?\nA:",
)


@pytest.fixture(scope="module")
def checkpoint(smollm2_path):
    return read_checkpoint(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module", params=[False, True], ids=["layers", "scan"])
def model(request, checkpoint):
    return load_llama(*checkpoint, scan_layers=request.param)


@pytest.fixture(scope="module")
def plain(checkpoint):
    config, tensors = checkpoint
    weights = {name: jnp.asarray(value) for name, value in tensors.items()}
    return config, weights, jax.jit(lambda tokens: plain_llama(config, weights, tokens))


def _stored(case):
    with np.load(FOLDER / "logits.npz") as stored:
        names = ("ids", "last_logits", "topk_vals", "topk_idx", "greedy")
        return {name: stored[f"{case}_{name}"] for name in names}


def _padded(ids):
    return jnp.asarray(np.pad(ids, (0, -len(ids) % GRAIN))[None], jnp.int32)


@pytest.mark.parametrize("case", CASES)
def test_token_ids_are_equal(case, tokenizer):
    prompt = CASES[case]["prompt"]
    ids = (
        tokenizer.encode(prompt)
        if isinstance(prompt, str)
        else tokenizer.encode_chat(prompt)
    )
    assert ids == _stored(case)["ids"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_within_the_tolerance(case, model):
    stored = _stored(case)
    logits = np.asarray(nnx.jit(lambda m, t: m(t))(model, _padded(stored["ids"])))[0]
    logits = logits[: len(stored["ids"])]
    np.testing.assert_allclose(logits[-1], stored["last_logits"], atol=2e-3, rtol=0)
    picked = np.take_along_axis(logits, stored["topk_idx"], -1)
    np.testing.assert_allclose(picked, stored["topk_vals"], atol=2e-3, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_equal_and_prefill_agrees_with_decoding(case, model):
    stored = _stored(case)
    ids, wanted = stored["ids"].tolist(), stored["greedy"].tolist()
    ends = (2,) if case.startswith("chat") else ()
    (made,) = model.generate([ids], max_tokens=len(wanted), eos_ids=ends)
    assert made == wanted
    (one_by_one,) = _generate_token_by_token(model, ids, len(wanted), ends)
    assert one_by_one == wanted


def _generate_token_by_token(model, ids, count, ends):
    """The prompt's first token is prefilled; every other one is decoded."""
    graph, state = nnx.split(model)
    step = jax.jit(lambda state, t, cache: nnx.merge(graph, state).decode(t, cache))
    first = jnp.asarray([ids[:1]], jnp.int32)
    _, cache = model.prefill(first, jnp.array([1], jnp.int32), GRAIN * 2)
    fed, made = list(ids[1:]), []
    while len(made) < count:
        token, fed = fed[0], fed[1:]
        logits, cache = step(state, jnp.array([[token]], jnp.int32), cache)
        if not fed:
            made.append(int(logits[0, -1].argmax()))
            fed = [made[-1]]
            if made[-1] in ends:
                break
    return [made]


@pytest.mark.parametrize("prompt", MORE_PROMPTS)
def test_other_prompts_agree_with_the_plain_computation(
    prompt, model, plain, tokenizer
):
    ids = tokenizer.encode(prompt)
    got = nnx.jit(lambda m, t: m(t))(model, _padded(ids))[0, : len(ids)]
    wanted = plain[2](_padded(ids))[0, : len(ids)]
    np.testing.assert_allclose(got, wanted, atol=2e-3, rtol=0)


def test_a_ragged_batch_continues_each_prompt_as_alone(model, tokenizer):
    prompts = [tokenizer.encode(p) for p in MORE_PROMPTS]
    together = model.generate(prompts, max_tokens=8, eos_ids=())
    alone = [model.generate([p], max_tokens=8, eos_ids=())[0] for p in prompts]
    assert together == alone


def test_the_gradient_is_made_of_backward_macros_and_is_right(model, plain):
    config, weights, _ = plain
    tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, config.vocab_size)
    graph, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graph, state)(tokens)[:, :-1]
        log_p = jax.nn.log_softmax(logits, -1)
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()

    emitted = neuronjax.trace(jax.grad(loss), state)
    for name in ("BackwardsAttention", "QKVBwd", "OutputProjectionBwd", "MLPBwd"):
        assert emitted.count(name) == config.num_layers == 30
    wanted = jax.jit(jax.grad(lambda w: plain_loss(config, w, tokens)))(weights)
    wanted = load_llama(config, wanted, scan_layers=model.scan_layers)
    got = jax.jit(jax.grad(loss))(state)
    wanted = jax.tree.leaves(nnx.state(wanted))
    for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
        assert jnp.linalg.norm(a - b) <= 1e-3 * jnp.linalg.norm(b)


def test_each_layers_macro_is_lowered_once_in_the_decode_step(model):
    graph, state = nnx.split(model)
    token = jnp.zeros((1, 1), jnp.int32)
    _, cache = model.prefill(token, jnp.ones(1, jnp.int32), GRAIN)

    def step(state, cache):
        return nnx.merge(graph, state).decode(token, cache)

    text = jax.jit(step).lower(state, cache).as_text()
    for name in ("QKV", "AttentionTkgFwd", "OutputProjection", "MLP"):
        assert text.count(f"func.func private @{name}(") == 1
        assert neuronjax.trace(step, state, cache).count(name) == 30


@pytest.fixture(scope="module")
def fused(checkpoint):
    return load_llama(*checkpoint, scan_layers=True).fused()


@pytest.mark.parametrize("case", CASES)
def test_the_fused_stack_gives_the_same_logits_and_tokens(case, fused):
    """All 30 layers are one macro in prefill; decoding is layer by layer."""
    stored = _stored(case)
    ids, wanted = stored["ids"].tolist(), stored["greedy"].tolist()
    logits = np.asarray(nnx.jit(lambda m, t: m(t))(fused, _padded(stored["ids"])))[0]
    last = logits[len(ids) - 1]
    np.testing.assert_allclose(last, stored["last_logits"], atol=2e-3, rtol=0)
    ends = (2,) if case.startswith("chat") else ()
    (made,) = fused.generate([ids], max_tokens=len(wanted), eos_ids=ends)
    assert made == wanted


def test_the_fused_stack_is_one_macro(fused):
    graph, state = nnx.split(fused)
    tokens = jnp.zeros((1, GRAIN), jnp.int32)
    seen = neuronjax.trace(lambda state: nnx.merge(graph, state)(tokens), state)
    assert seen.count("Llama3Transformer") == 1 and seen.count("MLP") == 0
