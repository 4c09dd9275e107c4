"""Cases of `attention_tkg` over flat and block caches."""

import dataclasses

import numpy as np

import neuronjax
from tests.adapters import adapter

_FIELDS = {field.name for field in dataclasses.fields(neuronjax.AttnTKGConfig)}


@adapter("attention_tkg")
def attention_tkg(inputs, options):
    sizes = {k: v for k, v in options.items() if k in _FIELDS}
    # The cases keep the vendor's literal rule for windows of several new tokens.
    literal = dict(stale_slots_visible="start_pos_ids" in inputs)
    config = neuronjax.AttnTKGConfig(**{**literal, **sizes})
    inputs = {"mask": None, **inputs}
    linear = inputs.pop("mask_linear_for_reference", None)
    if "active_blocks_table" in inputs and not config.use_pos_id:
        inputs["mask"] = _in_token_order(inputs["mask"], config, options.get("lnc", 1))
        if linear is not None:
            np.testing.assert_array_equal(inputs["mask"], linear)
    out, k_out = neuronjax.attention_tkg(**inputs, cfg=config)
    return {"out": out} if k_out is None else {"out": out, "k_out": k_out}


def _in_token_order(mask, config, lnc):
    """A precomputed mask of a block cache comes in the chip's order."""
    return neuronjax.mask_to_token_order(
        mask,
        "BLOCK",
        block_len=config.block_len,
        lnc=lnc,
        enable_fa_s_prior_tiling=config.enable_fa_s_prior_tiling,
    )
