"""Cases of `router_topk`: experts that tie may be chosen in any order."""

import numpy as np

import neuronjax
from tests.adapters import adapter, comparison, take, within

_NAMES = ("router_logits", "expert_index", "expert_affinities")
_PLACED = (
    "use_column_tiling",
    "use_indirect_dma_scatter",
    "use_PE_broadcast_w_bias",
    "shard_on_tokens",
)


@adapter("router_topk")
def router_topk(inputs, options):
    names = ("act_fn", "k", "x_hbm_layout", "x_sb_layout", "router_pre_norm", *_PLACED)
    names += ("norm_topk_prob", "return_eager_affi")
    call = take(options, **{name: name for name in names})
    if options.get("x_input_in_sbuf"):  # the reference then reads [T, H]
        call["x_hbm_layout"] = 1
    if not call.get("router_pre_norm", True):  # no effect there; `router_topk` refuses
        call.pop("norm_topk_prob", None)
    got = neuronjax.router_topk(**inputs, **call)
    return dict(zip((*_NAMES, "expert_affinities_topk"), got, strict=False))


@comparison("router_topk")
def compare(name, got, wanted, case):
    """Indices by the logits that they name; rows with a tie by their sorted values."""
    logits = wanted["router_logits"]
    places = (np.asarray(x["expert_index"], np.int64) for x in (got, wanted))
    ours, theirs = (np.take_along_axis(logits, place, 1) for place in places)
    if name == "expert_index":
        assert all(len(set(row)) == len(row) for row in np.asarray(got[name]).tolist())
        return within(name, ours, theirs, case)
    values, expected = (np.asarray(x[name], np.float64) for x in (got, wanted))
    if name == "expert_affinities":
        tied = [len(set(row)) < len(row) for row in logits.tolist()]
        values[tied], expected[tied] = np.sort(values[tied]), np.sort(expected[tied])
    return within(name, values, expected, case)
