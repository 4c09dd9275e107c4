"""Cases of `gen_mask_tkg` and `gen_mask_tkg_hbm`."""

import jax
import jax.numpy as jnp

import neuronjax
from tests.adapters import adapter

PARTITIONS = 128
_SIZES = ("bs", "q_head", "s_active")
_TILE = ("is_s_prior_sharded", "s_prior_per_shard", "s_prior_offset", "block_len")
_TILE += ("strided_mm1", "is_batch_sharded", "batch_offset", "n_sprior_tile_total")
_TILE += ("shard_id",)


def _literal(starts):
    """The cases keep the vendor's literal rule for windows of several new tokens."""
    return dict(stale_slots_visible=starts is not None)


@adapter("gen_mask_tkg_hbm")
def gen_mask_tkg_hbm(inputs, options):
    names = (*_SIZES, "s_prior", "block_len", "lnc", "enable_fa_s_prior_tiling")
    sizes = {k: options[k] for k in names if k in options}
    literal = _literal(inputs.get("start_pos_hbm"))
    return {"mask": neuronjax.gen_mask_tkg_hbm(**inputs, **sizes, **literal)}


@adapter("gen_mask_tkg")
def gen_mask_tkg(inputs, options):
    sizes = {k: options[k] for k in (*_SIZES, *_TILE) if k in options}
    inputs = dict(inputs)
    for name in ("pos_ids", "start_pos"):  # a row, to be repeated over the partitions
        if f"{name}_row" in inputs:
            row = inputs.pop(f"{name}_row")
            inputs[name] = jnp.broadcast_to(row, (PARTITIONS, row.size))
    tiles = options["n_sprior_tile"]
    shape = (PARTITIONS, tiles, *(options[k] for k in _SIZES))
    out = jax.ShapeDtypeStruct(shape, "int32")
    literal = _literal(inputs.get("start_pos"))
    mask = neuronjax.gen_mask_tkg(mask_out=out, **inputs, **sizes, **literal)
    return {"mask": mask}
