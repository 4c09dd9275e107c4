"""The macros of the collectives, each the derivative of another.

A permute ring that gathers is the transpose of one that reduces, so three NAMEs with a
product, and two without, are closed under differentiation of any order.

Checkpoint names are `collective_matmul_out`, `matmul_reduce_scatter_out`,
`collective_matmul_bwd_d_rhs`, `fine_grained_all_gather_out`,
`fine_grained_reduce_scatter_out`, `sb2sb_all_gather_out`, `sb2sb_all_gather_bwd_d_x`.
"""

from typing import Any

from neuronjax.kernels import collective_matmul as ring
from neuronjax.kernels import gather
from neuronjax.primitives.collectives.example import example
from neuronjax.primitives.collectives.names import (
    COLLECTIVES,
    COLUMNS,
    COLUMNS_MIRROR,
    GATHER,
    GATHER_MIRROR,
    MATMUL,
    MATMUL_MIRROR,
    MATMUL_WEIGHT,
)
from neuronjax.primitives.macro import MacroFamily


def _matmul_backward(operands, outs, cotangents, *, name, **config):
    (lhs, rhs), (d_out,) = operands, cotangents
    (d_lhs,) = matmul_reduce_scatter(d_out, rhs.T, name=MATMUL_MIRROR, **config)
    return d_lhs, _weight(lhs, d_out, rhs.dtype, config)


def _mirror_backward(operands, outs, cotangents, *, name, **config):
    (lhs, rhs), (d_out,) = operands, cotangents
    (d_lhs,) = collective_matmul(d_out, rhs.T, name=MATMUL, **config)
    return d_lhs, _weight(d_out, lhs, rhs.dtype, config).T


def _weight(lhs, d_out, dtype, config):
    """The gradient of a weight, in its own dtype: that of `lhs` may be narrower."""
    config = dict(config, dtype=str(dtype))
    return collective_matmul_weight(lhs, d_out, name=MATMUL_WEIGHT, **config)[0]


def _weight_backward(operands, outs, cotangents, *, name, dtype=None, **config):
    (lhs, d_out), (d_weight,) = operands, cotangents
    (d_lhs,) = matmul_reduce_scatter(d_out, d_weight.T, name=MATMUL_MIRROR, **config)
    return d_lhs, *collective_matmul(lhs, d_weight, name=MATMUL, **config)


def _gather_backward(operands, outs, cotangents, *, name, **config):
    return reduce_scatter(*cotangents, name=GATHER_MIRROR, **config)


def _reduce_backward(operands, outs, cotangents, *, name, **config):
    return all_gather(*cotangents, name=GATHER, **config)


def _columns_backward(operands, outs, cotangents, *, name, **config):
    config |= COLLECTIVES[COLUMNS_MIRROR]._asdict()
    return column_scatter(*cotangents, name=COLUMNS_MIRROR, **config)


def _columns_mirror_backward(operands, outs, cotangents, *, name, **config):
    config |= COLLECTIVES[COLUMNS]._asdict()
    return sb2sb_all_gather(*cotangents, name=COLUMNS, **config)


_SYMBOLIC = "symbolic sizes inside shard_map have no lowering in XLA; export each size"


def _family(family: str, name: str, leaf: Any, plain: Any, backward: Any, out="out"):
    return MacroFamily(
        family,
        (name,),
        leaf,
        plain=plain,
        outputs=(out,),
        backward=backward,
        example=example,
        over="axis",
        refuses={"export, symbolic batch": _SYMBOLIC},
    )


collective_matmul = _family(
    "collective_matmul",
    MATMUL,
    ring.collective_matmul_fwd,
    ring.collective_matmul_plain,
    _matmul_backward,
)
matmul_reduce_scatter = _family(
    "matmul_reduce_scatter",
    MATMUL_MIRROR,
    ring.matmul_reduce_scatter_fwd,
    ring.matmul_reduce_scatter_plain,
    _mirror_backward,
)
collective_matmul_weight = _family(
    "collective_matmul_bwd",
    MATMUL_WEIGHT,
    ring.collective_matmul_weight_bwd,
    ring.collective_matmul_weight_plain,
    _weight_backward,
    "d_rhs",
)
all_gather = _family(
    "fine_grained_all_gather",
    GATHER,
    gather.all_gather_fwd,
    gather.all_gather_plain,
    _gather_backward,
)
reduce_scatter = _family(
    "fine_grained_reduce_scatter",
    GATHER_MIRROR,
    gather.reduce_scatter_fwd,
    gather.reduce_scatter_plain,
    _reduce_backward,
)
sb2sb_all_gather = _family(
    "sb2sb_all_gather",
    COLUMNS,
    gather.column_gather,
    gather.column_gather_plain,
    _columns_backward,
)
column_scatter = _family(
    "sb2sb_all_gather_bwd",
    COLUMNS_MIRROR,
    gather.column_scatter,
    gather.column_scatter_plain,
    _columns_mirror_backward,
    "d_x",
)
