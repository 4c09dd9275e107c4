"""Cases of `attention_tkg` over a flat cache."""

import dataclasses

import neuronjax
from tests.adapters import adapter

_FIELDS = {field.name for field in dataclasses.fields(neuronjax.AttnTKGConfig)}


@adapter("attention_tkg")
def attention_tkg(inputs, options):
    sizes = {k: v for k, v in options.items() if k in _FIELDS}
    config = neuronjax.AttnTKGConfig(**sizes)
    out, k_out = neuronjax.attention_tkg(**{"mask": None, **inputs}, cfg=config)
    return {"out": out} if k_out is None else {"out": out, "k_out": k_out}
