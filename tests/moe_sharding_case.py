"""A small mixture of experts for meshes of two cores: operands, calls, placements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.primitives.blockwise_mm.spec import (
    ClampLimits,
    MoECTESpec,
    ShardOnIConfig,
)
from neuronjax.sharding.mesh import make_mesh
from neuronjax.sharding.moe import sharded_moe_cte
from tests.arrays import array

SHARDS = ("block", "intermediate", "hidden")
SWISH = dict(
    activation_function="Swish",
    gate_clamp_upper_limit=0.6,
    up_clamp_upper_limit=0.5,
    up_clamp_lower_limit=-0.5,
)
TOKENS, EXPERTS, CHOICES, BLOCK, BLOCKS, D_MODEL, D_FF = 9, 3, 2, 4, 8, 8, 6


def routed(rng, skip_token):
    """`(affinities, token ids, experts)`: blocks in the order of their experts.

    Blocks that are left over go to the last expert and hold only padding.
    """
    padding = -1 if skip_token else TOKENS
    affinity = np.zeros((TOKENS + (not skip_token), EXPERTS), np.float32)
    slots, experts = [], []
    chosen = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    for expert in range(EXPERTS):
        tokens = np.nonzero((chosen == expert).any(1))[0]
        affinity[tokens, expert] = rng.uniform(0.1, 1, len(tokens))
        for start in range(0, len(tokens), BLOCK):
            block = tokens[start : start + BLOCK]
            slots += [*block, *[padding] * (BLOCK - len(block))]
            experts.append(expert)
    spare = BLOCKS - len(experts)
    assert spare >= 0
    slots += [padding] * spare * BLOCK
    experts += [EXPERTS - 1] * spare
    ids = (np.asarray(x, np.int32) for x in (slots, experts))
    return affinity.reshape(-1, 1), *ids


def operands(
    dtype="float32",
    *,
    skip_token=False,
    biases=True,
    d_model=D_MODEL,
    d_ff=D_FF,
    seed=0,
):
    """Arguments of `moe_cte` by name, but for its options."""
    rng = np.random.default_rng(seed)
    affinity, slots, experts = routed(rng, skip_token)
    hidden = rng.standard_normal((TOKENS, d_model))
    if not skip_token:
        hidden = np.concatenate([hidden, np.zeros((1, d_model))])
    draw = rng.standard_normal
    floats = dict(
        hidden_states=hidden,
        expert_affinities_masked=affinity,
        gate_up_proj_weight=0.4 * draw((EXPERTS, d_model, 2, d_ff)),
        down_proj_weight=0.4 * draw((EXPERTS, d_ff, d_model)),
    )
    if biases:
        floats["gate_and_up_proj_bias"] = 0.3 * draw((EXPERTS, 2, d_ff))
        floats["down_proj_bias"] = 0.3 * draw((EXPERTS, d_model))
    arrays = {name: array(x, dtype) for name, x in floats.items()}
    ids = dict(token_position_to_id=slots, block_to_expert=experts)
    return arrays | {name: jnp.asarray(x) for name, x in ids.items()}


def lnc_mesh(cores=2):
    return make_mesh(lnc=2) if cores == 2 else make_mesh(cores=cores)


def alone(arrays, options):
    spec = options.get("spec", "shard_on_block")
    options = {key: x for key, x in options.items() if key != "spec"}
    return neuronjax.moe_cte(**arrays, block_size=BLOCK, spec=spec, **options)


def over(mesh, shard, arrays, options):
    given = dict(lnc=mesh.axis_names[-1], shard_on=shard)
    return sharded_moe_cte(mesh, **arrays, block_size=BLOCK, **given, **options)


def stores(**more):
    """A spec that returns what is stored."""
    on_i = ShardOnIConfig(checkpoint_activation=True, **more)
    return dict(spec=MoECTESpec("shard_on_i", shard_on_I=on_i))


def waves(x):
    return jnp.sin(1 + jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)


# How operands lie where a kernel takes them as they are.
LIES = {
    "block": {},
    "intermediate": dict(
        gate_up_proj_weight=P(None, None, None, "lnc"),
        down_proj_weight=P(None, "lnc"),
        gate_and_up_proj_bias=P(None, None, "lnc"),
    ),
    "hidden": dict(
        hidden_states=P(None, "lnc"),
        gate_up_proj_weight=P(None, "lnc"),
        down_proj_weight=P(None, None, "lnc"),
        down_proj_bias=P(None, "lnc"),
    ),
}


def placed(mesh, arrays, lies):
    return {
        name: jax.device_put(x, NamedSharding(mesh, lies.get(name, P())))
        for name, x in arrays.items()
    }


# The same of the backward from stored activations, and its options.
BACKWARD = {
    "replicated": {},
    "hidden": dict(
        hidden_states=P(None, "lnc"),
        gate_up_proj_weight=P(None, "lnc"),
        down_proj_weight=P(None, None, "lnc"),
        down_proj_act_checkpoint=P(None, None, "lnc"),
        output_hidden_states_grad=P(None, "lnc"),
    ),
    "intermediate": dict(
        gate_up_proj_weight=P(None, None, None, "lnc"),
        down_proj_weight=P(None, "lnc"),
        gate_up_proj_act_checkpoint_T=P(None, None, "lnc"),
    ),
}
OPTIONS = dict(
    activation_type="Swish",
    clamp_limits=ClampLimits(0.5, -0.5, 0.6, None),
    bias=True,
    block_size=BLOCK,
)


def backward_operands(dtype="float32"):
    """What a forward with biases and clamps stored, and a cotangent."""
    arrays = operands(dtype)
    options = SWISH | stores()
    out, gate_up, down = alone(arrays, options)
    for name in ("gate_and_up_proj_bias", "down_proj_bias"):
        del arrays[name]
    return arrays | dict(
        gate_up_proj_act_checkpoint_T=gate_up,
        down_proj_act_checkpoint=down,
        output_hidden_states_grad=waves(out).astype(dtype),
    )
