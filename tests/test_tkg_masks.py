"""Masks of decode attention by position ids, and the orders in which chips keep them.

The rules are those of the specification, slot by slot, in integers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neuronjax
from tests.decode_case import visible

SIZES = dict(bs=2, q_head=3, s_active=2)
TREE = np.array([[1, 0], [1, 1]], bool)  # query, key


def _rows(order, slots, piece=0):
    """The token of each row, from the formulas of the specification."""
    tokens = np.zeros(slots, int)
    for token in range(slots):
        if order == "SEQUENTIAL":
            row = token
        elif order == "STRIDED":
            tiles = slots // 128
            row = token % tiles * 128 + token // tiles
        else:
            fold, rest = divmod(token, 128 * piece)
            row = fold * 128 * piece + rest % piece * 128 + rest // piece
        tokens[row] = token
    return tokens


def _piece(shape, block_len, lnc, tiled=True):
    slots, batch, heads, seq = shape
    by_batch = batch % 2 == 0 and (batch * heads * seq > 128 or slots < 256)
    cores = 2 if lnc == 2 and not by_batch and slots >= 256 else 1
    shard = slots // cores
    piece = math.gcd(block_len, shard // 128)
    if tiled and shard > 8192:
        piece = math.gcd(piece, 64, shard % 8192 // 128)
    return piece


BLOCKS = [
    ((256, 2, 2, 1), 16, 1, 2),
    ((1024, 1, 1, 1), 16, 2, 4),  # two cores share the slots
    ((1024, 2, 1, 1), 16, 2, 4),
    ((1024, 2, 65, 1), 16, 2, 8),  # they share the sequences instead
    ((2048, 1, 1, 1), 64, 1, 16),
    ((10240, 1, 1, 1), 64, 1, 16),  # a tile of 8192 slots, and one of 2048
    ((8192 + 384, 1, 1, 1), 64, 1, 1),
    ((24576, 1, 1, 1), 128, 2, 32),  # a core has 12288
]


@pytest.mark.parametrize(("shape", "block_len", "lnc", "piece"), BLOCKS)
def test_blocks_are_cut_so_that_cores_and_tiles_hold_whole_rows(
    shape, block_len, lnc, piece
):
    assert _piece(shape, block_len, lnc) == piece
    token = np.arange(shape[0])[:, None, None, None]
    mask = jnp.asarray(np.broadcast_to(token, shape).astype("int32"))
    sizes = dict(block_len=block_len, lnc=lnc)
    got = neuronjax.mask_from_token_order(mask, "BLOCK", **sizes)
    np.testing.assert_array_equal(got[:, 0, 0, 0], _rows("BLOCK", shape[0], piece))
    back = neuronjax.mask_to_token_order(got, neuronjax.MaskOrder.BLOCK, **sizes)
    np.testing.assert_array_equal(back, mask)


def test_without_tiles_of_slots_the_pieces_are_longer():
    token = jnp.arange(10240, dtype=jnp.int32).reshape(-1, 1, 1, 1)
    sizes = dict(block_len=80, enable_fa_s_prior_tiling=False)
    got = neuronjax.mask_from_token_order(token, "BLOCK", **sizes)
    assert _piece(token.shape, 80, 1, tiled=False) == 80
    np.testing.assert_array_equal(got.ravel(), _rows("BLOCK", 10240, 80))
    tiled = neuronjax.mask_from_token_order(token, "BLOCK", block_len=80)
    np.testing.assert_array_equal(tiled.ravel(), _rows("BLOCK", 10240, 16))


@pytest.mark.parametrize("order", ["SEQUENTIAL", "STRIDED"])
def test_orders_of_flat_caches(order):
    token = jnp.arange(512, dtype=jnp.int32).reshape(-1, 1, 1, 1)
    convert = jax.jit(lambda x: neuronjax.mask_from_token_order(x, order))
    got = convert(token)
    np.testing.assert_array_equal(got.ravel(), _rows(order, 512))
    back = neuronjax.mask_to_token_order(got, order)
    np.testing.assert_array_equal(back, token)


def _exact(positions, starts, slots, active: Any = TREE, literal=False):
    """`[slots, B, Hq, s]` in token order, the last slots as `active` says."""
    ends = np.asarray(positions)[:, 0]
    if literal and starts is not None:
        ends = positions
    seen = visible(ends, starts, 2, slots)[:, :, :slots]
    if active is not None:
        seen[:, :, slots - 2 :] = active
    wide = np.moveaxis(seen, 2, 0)[:, :, None]
    return np.broadcast_to(wide, (slots, 2, 3, 2)).astype("int32")


POSITIONS = [[5, 6], [300, 301]]
STARTS = [None, [[1, 2], [290, 291]], [[400, 401], [12, 13]]]


def _active(active):
    if active is None:
        return None
    return jnp.broadcast_to(jnp.asarray(active.T)[:, None, None], (2, 2, 3, 2))


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint32"])
@pytest.mark.parametrize("active", [None, TREE])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("block_len", [0, 32])
def test_a_whole_mask_has_the_values_of_the_rules(block_len, starts, active, dtype):
    row = jnp.asarray(np.reshape(POSITIONS, (1, 4)), dtype)
    first = None if starts is None else jnp.asarray(np.reshape(starts, (1, 4)), dtype)
    got = jax.jit(
        lambda row, first: neuronjax.gen_mask_tkg_hbm(
            *(row, *SIZES.values(), 512, first, block_len, _active(active))
        )
    )(row, first)
    order = "BLOCK" if block_len else "STRIDED"
    rows = neuronjax.mask_to_token_order(got, order, block_len=block_len)
    np.testing.assert_array_equal(rows, _exact(POSITIONS, starts, 512, active))
    assert got.dtype == jnp.int32


@pytest.mark.parametrize("literal", [False, True])
def test_a_query_sees_stale_slots_only_where_that_is_asked_for(literal):
    """The window of the last query starts at its predecessor, a new token."""
    starts = [[400, 401], [301, 301]]
    given = [jnp.asarray(np.reshape(x, (1, 4)), "int32") for x in (POSITIONS, starts)]
    got = neuronjax.gen_mask_tkg_hbm(
        given[0],
        **SIZES,
        s_prior=512,
        start_pos_hbm=given[1],
        stale_slots_visible=literal,
    )
    got = neuronjax.mask_to_token_order(got, "STRIDED")
    wanted = np.array(_exact(POSITIONS, starts, 512, None, literal))
    if not literal:
        starts[1][1] = 300
        wanted = _exact(POSITIONS, starts, 512, None)
    np.testing.assert_array_equal(got, wanted)


ORDERS = [(0, True), (0, False), (2, False)]


def _tile(mask, block_len, strided):
    """Token-ordered `[slots, ...]` on partitions, by the formulas of section 4."""
    tiles = len(mask) // 128
    out = np.zeros((128, tiles, *mask.shape[1:]), mask.dtype)
    for k in range(len(mask)):
        if block_len:
            fold, rest = divmod(k, 128 * block_len)
            p, f = rest // block_len, fold * block_len + rest % block_len
        elif strided:
            p, f = divmod(k, tiles)
        else:
            f, p = divmod(k, 128)
        out[p, f] = mask[k]
    return out


@pytest.mark.parametrize("starts", STARTS[:2])
@pytest.mark.parametrize("offset", [0, 256])
@pytest.mark.parametrize("sharded", [None, 0, 1])
@pytest.mark.parametrize(("block_len", "strided"), ORDERS)
def test_a_tile_holds_its_part_of_the_cache(
    block_len, strided, sharded, offset, starts
):
    """Two cores of 512 slots each, tiles of 256: the new tokens end each shard."""
    given = (POSITIONS, starts) if starts else (POSITIONS,)
    ids = [jnp.asarray(np.reshape(x, (1, 4)), "int32") for x in given]
    got = neuronjax.gen_mask_tkg(
        ids[0],
        jax.ShapeDtypeStruct((128, 2, 2, 3, 2), "float32"),
        *SIZES.values(),
        sharded is not None,
        512,
        ids[1] if starts else None,
        offset,
        block_len,
        strided,
        _active(TREE),
        shard_id=sharded or 0,
    )
    whole = _exact(POSITIONS, starts, 1024, None)[(sharded or 0) * 512 :][:512].copy()
    whole[510:] = np.moveaxis(np.broadcast_to(TREE, (2, 3, 2, 2)), 3, 0)
    wanted = _tile(whole[offset : offset + 256], block_len, strided)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, wanted)


def test_a_core_takes_its_half_of_the_active_mask():
    active = np.random.default_rng(0).integers(0, 2, (2, 6, 3, 2))
    ids = jnp.zeros((128, 4), jnp.int32)
    out = jax.ShapeDtypeStruct((128, 2, 2, 3, 2), "int32")
    got = neuronjax.gen_mask_tkg(
        ids,
        out,
        **SIZES,
        is_s_prior_sharded=False,
        s_prior_per_shard=256,
        active_mask=jnp.asarray(active),
        is_batch_sharded=True,
        batch_offset=1,
        shard_id=1,
    )
    np.testing.assert_array_equal(got[127], active[:, 4:])
    assert not np.any(got[:127])


def test_a_strided_tile_of_a_larger_cache_is_a_range_of_columns():
    """`n_sprior_tile_total` tiles in all: partition p holds as many tokens."""
    whole = _tile(_exact(POSITIONS, None, 1024), 0, True)
    ids = jnp.asarray(np.reshape(POSITIONS, (1, 4)), "int32")
    for shard, offset in ((0, 0), (0, 256), (1, 0), (1, 256)):
        got = neuronjax.gen_mask_tkg(
            ids,
            jax.ShapeDtypeStruct((128, 2, 2, 3, 2), "int32"),
            **SIZES,
            is_s_prior_sharded=True,
            s_prior_per_shard=512,
            s_prior_offset=offset,
            active_mask=_active(TREE),
            n_sprior_tile_total=8,
            shard_id=shard,
        )
        first = (shard * 512 + offset) // 128
        np.testing.assert_array_equal(got, whole[:, first : first + 2])


def test_masks_have_no_gradient_and_are_those_that_attention_takes():
    """R-45: position ids give the mask, the mask gives the attention of the ids."""
    sizes: dict[str, Any] = dict(bs=2, q_head=2, s_active=2)
    sizes |= dict(curr_sprior=256, full_sprior=256, d_head=4)
    rng = np.random.default_rng(0)
    shapes = [(2, 2, 2, 4), (2, 1, 2, 4), (2, 1, 2, 4), (2, 1, 4, 256), (2, 1, 256, 4)]
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]
    positions = jnp.array([[5, 6], [200, 201]])
    starts = jnp.array([[0, 0], [195, 196]])
    active = jnp.broadcast_to(jnp.asarray(TREE.T)[:, None, None], (2, 2, 2, 2))

    def by_mask(q):
        mask = neuronjax.gen_mask_tkg_hbm(
            positions.reshape(1, -1),
            bs=2,
            q_head=2,
            s_active=2,
            s_prior=256,
            start_pos_hbm=starts.reshape(1, -1),
            active_mask=active,
        )
        mask = neuronjax.mask_to_token_order(mask, "STRIDED")
        config = neuronjax.AttnTKGConfig(**sizes)
        return neuronjax.attention_tkg(q, *arrays[1:], mask, config)[0].sum()

    def by_ids(q):
        config = neuronjax.AttnTKGConfig(**sizes, use_pos_id=True)
        ids = dict(rope_pos_ids=positions, start_pos_ids=starts)
        return neuronjax.attention_tkg(q, *arrays[1:], None, config, **ids)[0].sum()

    got, wanted = (jax.value_and_grad(f)(arrays[0]) for f in (by_mask, by_ids))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-5, atol=1e-6)
