"""Block-scaled calls of `moe_cte`: containers, and the matrices they stand for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import mx_equations as mx
from tests.moe_case import Case
from tests.moe_equations import Moe

WEIGHTS = dict(gate_up_proj_weight="hidden", down_proj_weight="intermediate")


def tiled(bias):
    """Biases `[..., I]` in the intermediate's order, `[Ip, ..., ceil(I/512), 4]`."""
    size = bias.shape[-1]
    p, r = mx.shape_of("intermediate", size)
    result = np.zeros((p, *bias.shape[:-1], r, 4), bias.dtype)
    for container, tile, q in np.ndindex(p, r, 4):
        row = mx.row_of("intermediate", size, q, container, tile)
        if row is not None:
            result[container, ..., tile, q] = bias[..., row]
    return result


def _packed(w, order, name):
    """Containers, scales and values of `[E, K, *N]`, as `[E, P, *N, R]` turned.

    The rows of containers come first, then the axes between, then tiles and columns.
    """
    packed, scales, dense = [], [], []
    for each in w:
        flat = each.reshape(each.shape[0], -1)
        values, scale = mx.packed_weight(flat, order, name)
        dense.append(mx.rounded_rows(flat.T, order, name).T.reshape(each.shape))
        for kept, x in ((packed, values), (scales, scale)):
            x = x.reshape(*x.shape[:2], *each.shape[1:])
            kept.append(np.moveaxis(x, 1, -2))
    return map(np.stack, (packed, scales, dense))


class Block:
    """Random operands of one call: packed for it, and as dense matrices."""

    def __init__(self, name, width, inner, implementation, scaling="POST_SCALE"):
        self.case = Case(
            tokens=5, experts=2, block=4, width=width, inner=inner, bias=True,
            clamps=(2.0, None, 2.0, -1.5), implementation=implementation,
            scaling=scaling,
        )  # fmt: skip
        index = self.case.index()
        self.dense = {n: np.asarray(x) for n, x in self.case.floats(index).items()}
        self.rest = self.case.routed(index)
        if "shard_on_i_mx_hybrid" == implementation:
            self.rest["conditions"] = np.ones(self.case.count + 1, np.int32)
        if "shard_on_block_mx" == implementation:
            self.rest["conditions"] = np.ones(self.case.count + 2, np.int32)
        self.given = dict(self.dense)
        self.scales: dict[str, Any] = dict(weight_dtype=name)
        for key, order in WEIGHTS.items():
            packed, scale, dense = _packed(self.dense[key], order, name)
            self.given[key] = packed
            self.scales[key.replace("weight", "scale")] = jnp.asarray(scale)
            self.dense[key] = dense
        bias = self.dense["gate_and_up_proj_bias"]
        self.given["gate_and_up_proj_bias"] = self.tiled(bias)
        self.given = {n: jnp.asarray(x) for n, x in self.given.items()}

    def call(self, given, **options):
        rest = self.rest | dict(quantization_config=self.scales)
        return self.case.call(given, rest, **options)

    def run(self):
        return np.asarray(jax.jit(self.call)(self.given))

    def reference(self):
        """The equations over the dense matrices, with activations rounded."""
        return Moe(self.dense | self.rest | self.case.settings, mx=True)

    @staticmethod
    def tiled(bias):
        """Biases `[E, 2, I]` as the call takes them."""
        return np.stack([tiled(x) for x in bias])
