"""Cases of `attention_cte` and `attention_bwd`."""

import neuronjax
from tests.adapters import adapter


@adapter("attention_cte")
def attention_cte(inputs, options):
    got = neuronjax.attention_cte(**inputs, **options)
    if not options.get("cache_softmax"):
        return {"out": got}
    return dict(zip(("out", "out_neg_max", "out_sum_recip"), got, strict=True))


@adapter("attention_bwd")
def attention_bwd(inputs, options):
    settings = {k: v for k, v in options.items() if k != "compute_dtype"}
    grads = neuronjax.attention_bwd(**inputs, **settings)
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))
