"""Routing to blocks: every slot, by loops over the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.primitives.routing import block_size_for, most_blocks
from neuronjax.sharding import make_mesh


def experts_of(row, num_experts):
    """The experts of a token, each once."""
    return {int(e) for e in row if 0 <= e < num_experts}


def by_loops(index, num_experts, size, *, num_blocks, padding, mask=None, drop=False):
    """Blocks as lists: the definition, token by token."""
    held = {e: [] for e in range(num_experts)}
    for t, row in enumerate(np.asarray(index)):
        for e in experts_of(row, num_experts):
            if mask is None or mask[t]:
                held[e].append(t)
    blocks = []
    for e, tokens in held.items():
        if drop:
            blocks.append((e, tokens[:size]))
        else:
            cuts = range(0, len(tokens), size)
            blocks += [(e, tokens[i : i + size]) for i in cuts]
    used = max((i + 1 for i, (_, tokens) in enumerate(blocks) if tokens), default=0)
    blocks += [(num_experts - 1, [])] * (num_blocks - len(blocks))
    assert len(blocks) == num_blocks, "the bound holds"
    ids = [t + [padding] * (size - len(t)) for _, t in blocks]
    conditions = [int(i < used) for i in range(num_blocks + 2)]
    return np.array(ids).reshape(-1), [e for e, _ in blocks], conditions


def draw(tokens, k, num_experts, seed=0, extra=0):
    """Distinct experts a token, best first; `extra` numbers that name no expert."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(num_experts + extra)[:k] for _ in range(tokens)]
    return np.array(rows, np.int32).reshape(tokens, k)


def check(index, num_experts, size, *, mask=None, capacity=None, multiple=1):
    tokens, k = index.shape
    wanted_blocks = num_experts
    if capacity is None:
        spare = tokens * k - (num_experts - 1)
        wanted_blocks = max(int(np.ceil(spare / size)) + num_experts - 1, 1)
    wanted_blocks = -(-wanted_blocks // multiple) * multiple
    for skip in (False, True):
        got = jax.jit(
            lambda i, m, skip=skip: neuronjax.route_to_blocks(
                i,
                num_experts,
                None if capacity else size,
                capacity=capacity,
                skip_token=skip,
                token_mask=m,
                multiple=multiple,
            )
        )(index, mask)
        wanted = by_loops(
            index,
            num_experts,
            capacity or size,
            num_blocks=wanted_blocks,
            padding=-1 if skip else tokens,
            mask=mask,
            drop=capacity is not None,
        )
        for x, y in zip(got, wanted, strict=True):
            assert x.dtype == np.int32
            np.testing.assert_array_equal(x, y)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_every_slot_is_that_of_the_definition(data):
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    tokens, experts, size = pick(0, 9), pick(1, 6), pick(1, 5)
    k = pick(1, experts)
    index = draw(tokens, k, experts, pick(0, 99), extra=pick(0, 2))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=9, max_size=9)))
    capacity = data.draw(st.none() | st.integers(1, 5))
    multiple = pick(1, 3)
    check(
        index,
        experts,
        size,
        mask=mask[:tokens] if pick(0, 1) else None,
        capacity=capacity,
        multiple=multiple,
    )


@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "size"),
    [(0, 2, 4, 3), (1, 1, 1, 1), (1, 3, 3, 8), (40, 2, 64, 4), (64, 8, 8, 128)],
)
def test_odd_sizes(tokens, k, num_experts, size):
    index = draw(tokens, k, num_experts)
    check(index, num_experts, size, multiple=2)
    check(index, num_experts, size, capacity=2)


@pytest.mark.parametrize("to", [0, 2, 3])
def test_all_tokens_to_one_expert(to):
    check(np.full((7, 1), to, np.int32), 4, 3)
    check(np.full((7, 1), to, np.int32), 4, 3, capacity=2)


def test_the_worst_routing_fills_the_bound():
    """One token to all experts but one, and the rest to that one."""
    index = np.array([[0], [1], [2], *[[3]] * 5], np.int32)
    blocks = neuronjax.route_to_blocks(index, 4, 2)
    assert len(blocks.block_to_expert) == most_blocks(8, 1, 4, 2) == 6
    assert blocks.conditions.tolist() == [1] * 6 + [0, 0]


def test_an_index_that_is_no_expert_takes_no_slot():
    for dtype in ("int8", "int32", "int64", "uint32"):
        with jax.enable_x64(True):
            index = np.array([[4, 1], [100, 2]]).astype(dtype)
            if dtype == "int64":
                index[0, 0] = 2**32 + 1  # as int32 it would be 1
            if dtype == "int32":
                index[0, 0] = -1
            blocks = neuronjax.route_to_blocks(index, 4, 2)
            np.testing.assert_array_equal(
                blocks.token_position_to_id[:4], [0, 2, 1, 2], err_msg=dtype
            )
            assert blocks.conditions.sum() == 2


@pytest.mark.parametrize("far", [2**32 + 1, 2**63 + 1, -(2**32) + 1])
def test_a_wide_index_of_numpy_does_not_wrap(far):
    """Without x64 the same bits as int32 would name expert 1."""
    index = np.array([[far], [0]], np.uint64 if far >= 2**63 else np.int64)
    blocks = neuronjax.route_to_blocks(index, 2, 1, skip_token=True)
    assert blocks.token_position_to_id.tolist() == [1, -1]
    masked = neuronjax.mask_affinities(jnp.ones((2, 2)), index, skip_token=True)
    assert masked.ravel().tolist() == [0, 0, 1, 0]


def test_more_experts_than_an_int8_counts():
    index = np.array([[0, 127], [5, 0]], np.int8)
    blocks = neuronjax.route_to_blocks(index, 200, 2)
    assert blocks.block_to_expert[:3].tolist() == [0, 5, 127]


def test_an_expert_named_twice_takes_one_slot():
    index = jnp.array([[1, 1, 0], [1, 2, 1]])
    blocks = neuronjax.route_to_blocks(index, 3, 2)
    ids = blocks.token_position_to_id.reshape(-1, 2)[:3]
    assert ids.tolist() == [[0, 2], [0, 1], [1, 2]]


def test_padding_takes_no_capacity():
    """R-38: the slots, the counts and the loss are those of the real tokens alone."""
    x = jnp.array([[9.0, 0, 0], [8.0, 1, 0], [2.0, 1, 0], [3.0, 0, 1]])
    keep = jnp.array([False, False, True, True])
    rule = dict(act_fn="SOFTMAX", k=1, x_hbm_layout=1, router_pre_norm=False)
    logits, index, affinities = neuronjax.router_topk(
        x, jnp.eye(3), token_mask=keep, **rule
    )
    alone = neuronjax.router_topk(x[2:], jnp.eye(3), **rule)
    for mask in (None, keep):  # the router's own padding index is enough
        blocks = neuronjax.route_to_blocks(
            index, 3, capacity=2, token_mask=mask, skip_token=True
        )
        ids = blocks.token_position_to_id.reshape(3, 2)
        assert ids.tolist() == [[2, 3], [-1, -1], [-1, -1]]
        masked = neuronjax.mask_affinities(affinities, index, token_mask=mask)
        np.testing.assert_array_equal(masked.reshape(5, 3)[jnp.array([0, 1, 4])], 0)
        counts = neuronjax.expert_counts(index, 3, token_mask=mask)
        np.testing.assert_array_equal(counts, neuronjax.expert_counts(alone[1], 3))
    np.testing.assert_array_equal(masked.reshape(5, 3)[2:4], alone[2])
    loss = neuronjax.load_balance_loss(logits, index, token_mask=keep)
    wanted = neuronjax.load_balance_loss(alone[0], alone[1])
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)


def test_a_sort_with_more_pairs_than_a_key_can_hold(monkeypatch):
    from neuronjax.kernels import routing

    monkeypatch.setattr(routing, "_LARGEST", 0)
    check(draw(9, 3, 5, extra=1), 5, 2)


@pytest.mark.parametrize("skip", [False, True])
def test_masked_affinities_are_zero_where_no_token_goes(skip):
    rng = np.random.default_rng(0)
    dense = rng.random((4, 5)).astype(np.float32)
    index = np.array([[1, 3], [5, 0], [2, 2], [-1, 4]], np.int32)
    mask = np.array([True, True, True, False])
    wanted = np.zeros((4 if skip else 5, 5), np.float32)
    for t, row in enumerate(index):
        for e in experts_of(row, 5) if mask[t] else ():
            wanted[t, e] = dense[t, e]
    run = lambda a: neuronjax.mask_affinities(  # noqa: E731
        a, jnp.asarray(index), skip_token=skip, token_mask=jnp.asarray(mask)
    )
    np.testing.assert_array_equal(run(jnp.asarray(dense)), wanted.reshape(-1, 1))
    poisoned = np.where(wanted[:4] > 0, dense, np.nan)
    grad = jax.grad(lambda a: run(a).sum())(jnp.asarray(poisoned))
    np.testing.assert_array_equal(grad, wanted[:4] > 0)


def test_it_maps_and_shards_over_groups_of_tokens():
    index = np.stack([draw(6, 2, 4, seed) for seed in range(4)])
    route = lambda i: neuronjax.route_to_blocks(i, 4, 2)  # noqa: E731
    wanted = [route(i) for i in index]
    mapped = jax.vmap(route)(index)
    one = lambda i: jax.tree.map(lambda x: x[None], route(i[0]))  # noqa: E731
    mesh, split = make_mesh(data=4), dict(in_specs=P("data"), out_specs=P("data"))
    sharded = jax.jit(jax.shard_map(one, mesh=mesh, **split))(index)
    for got in (mapped, sharded):
        for i, each in enumerate(wanted):
            jax.tree.map(
                lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), got, each
            )


def test_sizes_may_be_integers_of_numpy():
    index, two = draw(4, 1, 3), np.int64(2)
    got = neuronjax.route_to_blocks(index, np.int64(3), two, multiple=two)
    wanted = neuronjax.route_to_blocks(index, 3, 2, multiple=2)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert neuronjax.route_to_blocks(index, 3, capacity=two).block_to_expert.size == 3


def test_more_blocks_than_needed_may_be_asked_for():
    index = draw(4, 1, 3)
    blocks = neuronjax.route_to_blocks(index, 3, 2, num_blocks=8, multiple=4)
    assert blocks.block_to_expert.shape == (8,)
    assert blocks.conditions.shape == (10,)


def test_memory_does_not_grow_with_tokens_times_experts():
    index = jax.ShapeDtypeStruct((4096, 2), "int32")
    route = jax.jit(lambda i: neuronjax.route_to_blocks(i, 256, 32))
    memory = route.lower(index).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096 * 256


def test_memory_does_not_grow_with_the_square_of_a_tokens_experts():
    index = jax.ShapeDtypeStruct((512, 128), "int32")
    route = jax.jit(lambda i: neuronjax.route_to_blocks(i, 128, 128))
    memory = route.lower(index).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 128 * 64


def test_tokens_that_an_explicit_mesh_divides_are_refused():
    mesh = make_mesh(explicit=True, data=2)
    with jax.set_mesh(mesh):
        index = jax.device_put(jnp.zeros((6, 2), jnp.int32), P("data"))
        with pytest.raises(NotImplementedError, match="route_to_blocks: .* of all tok"):
            neuronjax.route_to_blocks(index, 4, 2)
        with pytest.raises(NotImplementedError, match="mask_affinities: .* of all tok"):
            neuronjax.mask_affinities(jnp.ones((6, 4)), index)
        whole = jax.reshard(index, P())
        assert neuronjax.route_to_blocks(whole, 4, 2).block_to_expert.shape == (8,)


def test_a_symbolic_number_of_tokens_is_refused():
    (tokens,) = jax.export.symbolic_shape("t")
    index = jax.ShapeDtypeStruct((tokens, 2), "int32")
    with pytest.raises(NotImplementedError, match="route_to_blocks: .* follows T"):
        jax.export.export(jax.jit(lambda i: neuronjax.route_to_blocks(i, 4, 2)))(index)


@pytest.mark.parametrize(
    ("load", "size"),
    [((2048, 2, 8), 128), ((2048, 2, 64), 32), ((1, 2, 8), 1), ((0, 1, 1), 1)],
)
def test_the_block_size_follows_the_load(load, size):
    assert block_size_for(*load) == size
