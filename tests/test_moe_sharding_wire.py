"""What crosses the wire between the cores that share a layer of experts."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from neuronjax.primitives.blockwise_mm.spec import MoECTESpec, ShardOnBlockConfig
from neuronjax.sharding.moe import sharded_blockwise_mm_bwd
from tests.hlo import program
from tests.moe_equations import FLOATS
from tests.moe_sharding_case import (
    BACKWARD,
    BLOCK,
    D_FF,
    D_MODEL,
    LIES,
    OPTIONS,
    SHARDS,
    SWISH,
    backward_operands,
    lnc_mesh,
    operands,
    over,
    placed,
    waves,
)


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE", "NO_SCALE"])
def test_what_crosses_the_wire_forward(scaling):
    """Block: one final sum; I and H: one in the loop over blocks, and nothing else."""
    mesh = lnc_mesh()
    options = SWISH | dict(expert_affinities_scaling_mode=scaling)
    one = {"all-reduce": 1}
    for shard, wanted in dict(block=({}, one), intermediate=(one, {})).items():
        arrays = placed(mesh, operands(), LIES[shard])
        run = functools.partial(over, mesh, shard, options=options)
        assert program(run, arrays).places() == wanted, shard
    arrays = placed(mesh, operands(), LIES["hidden"])
    run = functools.partial(over, mesh, "hidden", options=options)
    assert program(run, arrays).places() == (one, {})


@pytest.mark.parametrize(("strategy", "gathers"), [("HI_LO", 0), ("PING_PONG", 2)])
def test_what_parts_of_blocks_store_stays_where_it_is(strategy, gathers):
    """Blocks dealt in turn are gathered where they are returned in order."""
    mesh, arrays = lnc_mesh(), operands()
    config = ShardOnBlockConfig(block_sharding_strategy=strategy)
    options = dict(spec=MoECTESpec("shard_on_block", config))
    blocks = len(arrays["block_to_expert"])
    arrays["gate_up_activations_T"] = jnp.zeros((blocks, 2, D_FF, BLOCK))
    arrays["down_activations"] = jnp.zeros((blocks, BLOCK, D_MODEL))
    run = functools.partial(over, mesh, "block", options=options)
    found = program(run, placed(mesh, arrays, {})).places()
    assert found.in_loops == {}
    assert found.once.pop("all-gather", 0) == gathers
    assert found.once == {"all-reduce": 1}


@pytest.mark.parametrize("scaling", ["POST_SCALE", "PRE_SCALE"])
def test_what_crosses_the_wire_in_the_vjp(scaling):
    """Beside the forward's: H one a block, I one of the tokens' gradient at the end.

    PRE_SCALE sums the affinities' gradient over what the cores divide, at the end.
    """
    mesh = lnc_mesh()
    options = SWISH | dict(expert_affinities_scaling_mode=scaling)
    found = {}
    for shard in SHARDS:
        arrays = placed(mesh, operands(), LIES[shard])
        floats = {key: x for key, x in arrays.items() if key in FLOATS}
        ids = {key: x for key, x in arrays.items() if key not in FLOATS}

        def pulled(floats, cotangent, shard=shard, ids=ids):
            run = functools.partial(over, mesh, shard, options=options)
            out, pull = jax.vjp(lambda floats: run(floats | ids), floats)
            return out, pull(cotangent)

        split = LIES[shard].get("hidden_states", P())
        seed = jax.device_put(
            waves(arrays["hidden_states"]), NamedSharding(mesh, split)
        )
        found[shard] = program(pulled, floats, seed).places()
    at_end = scaling == "PRE_SCALE"
    assert found["hidden"].in_loops == {"all-reduce": 2}
    assert found["hidden"].once == ({"all-reduce": 1} if at_end else {})
    assert found["intermediate"].in_loops == {"all-reduce": 1}
    # XLA may join the sums of tokens and affinities.
    assert 1 <= found["intermediate"].once.pop("all-reduce") <= 1 + at_end
    assert found["intermediate"].once == {}
    assert found["block"].in_loops == {}
    assert found["block"].once.keys() == {"all-reduce"}


@pytest.mark.parametrize(
    ("lie", "in_loops", "once"),
    [("replicated", 0, 0), ("hidden", 1, 0), ("intermediate", 0, 1)],
)
def test_what_crosses_the_wire_backward(lie, in_loops, once):
    mesh = lnc_mesh()
    arrays = placed(mesh, backward_operands(), BACKWARD[lie])

    def run(arrays):
        return sharded_blockwise_mm_bwd(mesh, **arrays, **OPTIONS, operands=lie)

    wanted = ({"all-reduce": n} if n else {} for n in (in_loops, once))
    assert program(run, arrays).places() == tuple(wanted)


def test_gradients_lie_as_the_docstring_says():
    """Each core has its columns; from operands split along I, its part of I."""
    mesh = lnc_mesh()
    own = {
        "replicated": [(10, 4), (30, 1), (3, 4, 2, 6), (3, 6, 4), (3, 2, 6), (3, 8)],
        "hidden": [(10, 4), (30, 1), (3, 4, 2, 6), (3, 6, 4), (3, 2, 6), (3, 4)],
        "intermediate": [(10, 8), (30, 1), (3, 8, 2, 3), (3, 3, 8), (3, 2, 3), (3, 8)],
    }
    for lie, wanted in own.items():
        arrays = placed(mesh, backward_operands(), BACKWARD[lie])
        got = jax.jit(
            lambda a, lie=lie: sharded_blockwise_mm_bwd(
                mesh, **a, **OPTIONS, operands=lie
            )
        )(arrays)
        assert [x.addressable_shards[0].data.shape for x in got] == wanted, lie
