"""A small mixture of experts for meshes of two cores: routed slots and operands."""

import jax.numpy as jnp
import numpy as np

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
    arrays = {name: jnp.asarray(x, dtype) for name, x in floats.items()}
    ids = dict(token_position_to_id=slots, block_to_expert=experts)
    return arrays | {name: jnp.asarray(x) for name, x in ids.items()}
