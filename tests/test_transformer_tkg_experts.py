"""Decode layers whose second half is a mixture of experts, against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.kernels.shard_common import Group
from neuronjax.primitives.transformer_tkg.feed_forward import (
    ExpertsFeedForward,
    options,
)
from neuronjax.primitives.transformer_tkg.layer import DecodeLayer, Tokens
from neuronjax.primitives.transformer_tkg.layers import decode_layers
from neuronjax.primitives.transformer_tkg.residual import Links
from neuronjax.sharding.mesh import make_mesh
from tests import hlo
from tests import transformer_case as case
from tests.transformer_case import operands, reference, silu, sizes

EXPERTS, TOP_K, EPS = 4, 2, 1e-6
OPTIONS = options(
    top_k=TOP_K,
    router_act_fn="SOFTMAX",
    norm_topk_prob=True,
    expert_affinities_scaling_mode="POST_SCALE",
    eps=EPS,
)
CORES = ("tensor", "lnc")
SPECS = dict(
    gamma=P(),
    router_weights=P(),
    expert_gate_up_weights=P(None, None, None, CORES),
    expert_down_weights=P(None, CORES),
)


@functools.cache
def _call():
    """A dense call of three layers, and the experts of each."""
    z, rng = sizes(L=3, G=2, n=2, I=8), np.random.default_rng(7)
    shapes = dict(
        gamma=(1, z["H"]),
        router_weights=(z["H"], EXPERTS),
        expert_gate_up_weights=(EXPERTS, z["H"], 2, z["I"]),
        expert_down_weights=(EXPERTS, z["I"], z["H"]),
    )

    def layer():
        return {
            k: jnp.asarray(rng.normal(size=s) / s[-2] ** 0.5, jnp.float32)
            for k, s in shapes.items()
        }

    return operands(z), [layer() for _ in range(z["L"])]


def _experts(h, own):
    """`sum_k p_k y_k(x)`, `p` the softmax of the largest logits alone."""
    x = case.norm(h, own["gamma"][0], EPS)
    logits = x @ own["router_weights"]
    kept = np.sort(logits, -1)[..., -TOP_K:-1]
    weight = np.where(logits >= kept, np.exp(logits), 0)
    weight = weight / weight.sum(-1, keepdims=True)
    out = np.zeros_like(h)
    for e in range(EXPERTS):
        gate, up = (own["expert_gate_up_weights"][e, :, side] for side in (0, 1))
        y = silu(x @ gate) * (x @ up) @ own["expert_down_weights"][e]
        out += weight[..., e : e + 1] * y
    return out


def _reference():
    call, experts = _call()

    def feed_forward(h, i):
        return _experts(h, {k: case.wide(x) for k, x in experts[i].items()})

    return reference(call, feed_forward)


def _layers(call, experts):
    layers = [
        DecodeLayer(
            gamma=call["W_gamma_qkvs"][i],
            w_qkv=call["W_qkvs"][i],
            w_out=call["W_outs"][i],
            feed_forward=ExpertsFeedForward(experts[i], options=OPTIONS),
            eps=EPS,
        )
        for i in range(call["num_layers"])
    ]
    return layers, (call["K_caches"], call["V_caches"])


def _stack(layers):
    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers)


def _specs(layers, lnc):
    """How a layer, or a stack of them, lies over the mesh."""
    stacked = isinstance(layers, DecodeLayer)
    leading = (None,) if stacked else ()

    def of(spec):
        axes = [_without_cores(axis, lnc) for axis in spec]
        return P(*leading, *axes)

    weights: dict[str, Any] = {k: of(s) for k, s in SPECS.items()}
    own: dict[str, Any] = dict(
        gamma=of(P()), w_qkv=of(P(None, "tensor")), w_out=of(P("tensor", "lnc"))
    )
    experts = ExpertsFeedForward(weights, options=OPTIONS)
    one = DecodeLayer(**own, feed_forward=experts, eps=EPS)
    cache = of(P(None, "tensor"))
    if stacked:
        return one, (cache, cache)
    return [one] * len(layers), ([cache] * len(layers),) * 2


def _without_cores(axis, lnc):
    names = (axis,) if isinstance(axis, str) else axis or ()
    names = tuple(name for name in names if lnc == 2 or name != "lnc")
    return names or None


def _on_mesh(layers, caches, tensor, lnc, in_sbuf):
    call, _ = _call()
    specs, held = _specs(layers, lnc)
    links = Links(Group("tensor"), "lnc" if lnc == 2 else None, in_sbuf)
    mask = call["mask_cache"].astype(bool)
    tokens = Tokens(call["RoPE_cos"], call["RoPE_sin"], mask, call["position_ids"])
    shared = Tokens(P(), P(), P(None, None, "tensor"), P())

    def local(x, layers, caches, tokens):
        return decode_layers(x, layers, caches, tokens, links)

    run = jax.shard_map(
        local,
        mesh=make_mesh(tensor=tensor, lnc=lnc),
        in_specs=(P(), specs, held, shared),
        out_specs=(P(), held),
    )
    return run(call["X"], layers, caches, tokens)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("tensor", "lnc", "in_sbuf"),
    [(1, 1, False), (2, 1, False), (2, 2, False), (2, 2, True)],
)
def test_experts_over_ranks_and_cores_are_the_equations(tensor, lnc, in_sbuf, stacked):
    layers, caches = _layers(*_call())
    if stacked:
        layers, caches = _stack(layers), tuple(map(jnp.stack, caches))
    run = functools.partial(_on_mesh, tensor=tensor, lnc=lnc, in_sbuf=in_sbuf)
    out, (k_caches, v_caches) = jax.jit(run)(layers, caches)
    wanted = _reference()
    got = [out, *k_caches, *v_caches]
    for a, b in zip(got, [wanted[0], *wanted[1], *wanted[2]], strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


def test_gradients_of_experts_are_those_of_one_device():
    layers, caches = _layers(*_call())

    def gradient(*mesh):
        def loss(layers):
            return jnp.sin(_on_mesh(layers, caches, *mesh)[0]).sum()

        return jax.jit(jax.grad(loss))(layers)

    got, wanted = gradient(2, 2, True), gradient(1, 1, False)
    for pair in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        a, b = map(np.asarray, pair)  # the meshes have other devices
        assert np.abs(b).max() > 0
        assert np.abs(a - b).max() <= 5e-5 * np.abs(b).max()


def test_a_layer_of_experts_is_a_block_a_router_and_experts():
    layers, caches = _layers(*_call())
    run = functools.partial(_on_mesh, tensor=2, lnc=2, in_sbuf=False)
    found = neuronjax.trace(run, layers, caches)
    names = ("AttentionBlockTkg", "RouterTopK", "ExpertMLPs", "MLP")
    assert [found.count(name) for name in names] == [3, 3, 3, 0]
    program, mesh = hlo.program(run, layers, caches), make_mesh(tensor=2, lnc=2)
    assert program.counts(hlo.along(mesh, "tensor")) == {"all-reduce": 6}
