"""Cases of `attention_cte` and `attention_bwd`."""

import contextlib

import jax.numpy as jnp

import neuronjax
from tests.adapters import adapter


@adapter("attention_cte")
def attention_cte(inputs, options):
    # Only gen4 rounds the scores; the cases name no target.
    low = jnp.dtype(options.get("mm_out_dtype", "float32")) == jnp.bfloat16
    with neuronjax.target("gen4") if low else contextlib.nullcontext():
        got = neuronjax.attention_cte(**inputs, **options)
    if not options.get("cache_softmax"):
        return {"out": got}
    out, *statistics = got
    neg_max, recip = map(_as_the_chip_stores, statistics)
    return {"out": out, "out_neg_max": neg_max, "out_sum_recip": recip}


def _as_the_chip_stores(rows):
    """The cases hold `[heads, 128, q_seq / 128]`, where that is whole."""
    return rows if rows.shape[1] % 128 else neuronjax.statistics_to_tiles(rows)


@adapter("attention_bwd")
def attention_bwd(inputs, options):
    settings = {k: v for k, v in options.items() if k != "compute_dtype"}
    # There 0 is another word for the default; here it is 0.
    settings["softmax_scale"] = settings.get("softmax_scale") or None
    grads = neuronjax.attention_bwd(**inputs, **settings)
    names = ["dq", "dk", "dv", *(["dsinks"] if "sinks_ref" in inputs else [])]
    return dict(zip(names, grads, strict=True))
