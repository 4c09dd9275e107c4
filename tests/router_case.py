"""Operands of the router, and a short call of it."""

import numpy as np

import neuronjax
from tests.arrays import array


def operands(tokens=6, width=16, experts=9, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = (tokens, width), (width, experts), (1, experts)
    return [array(rng.standard_normal(s), dtype) for s in shapes]


def router(x, w, b=None, *, k=3, layout=1, **options):
    return neuronjax.router_topk(x, w, b, k=k, x_hbm_layout=layout, **options)
