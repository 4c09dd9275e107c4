"""An all-to-all that every map takes: JAX's own has no rule for groups.

Nor has it a right one for an operand that all ranks of a mapped axis hold alike.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from neuronjax.kernels.shard_common import consecutive_groups, uniform


def exchanged(x: jax.Array, axis: str, ranks: int, split: int, concat: int) -> Any:
    """Divides the axis `split` over a group's ranks and joins along `concat`.

    Args:
        x: what this rank holds.
        axis: the mesh axis of the ranks, or one of `vmap`.
        ranks: how many neighbours on `axis` are a group.
        split: whose `i`-th part goes to the `i`-th rank of the group.
        concat: along which the parts that come are joined, in the order of the ranks.
    """
    (x,) = uniform(x, over=axis)
    if ranks == 1:
        return x
    return exchange_p.bind(x, axis=axis, ranks=ranks, split=split, concat=concat)


@functools.cache
def _exchange(*, axis: str, ranks: int, split: int, concat: int) -> Any:
    """One all-to-all, jitted."""

    def grouped_all_to_all(x):
        size = lax.axis_size(axis)
        groups = None if ranks == size else consecutive_groups(ranks, size // ranks)
        return lax.all_to_all(
            x, axis, split, concat, axis_index_groups=groups, tiled=True
        )

    return jax.jit(grouped_all_to_all)


def _transpose(cotangent, x, *, split, concat, **params):
    return [exchange_p.bind(cotangent, split=concat, concat=split, **params)]


def _batch(mapped, operands, dims, *, axis, ranks, split, concat):
    (x,), (dim,) = operands, dims
    params = dict(axis=axis, ranks=ranks)
    if mapped.name == axis:
        x = batching.bdim_at_front(x, dim, mapped.size)  # also where all hold it alike
        return _among_mapped(x, split=split, concat=concat, **params), 0
    if dim is None:
        return exchange_p.bind(x, split=split, concat=concat, **params), None
    x = batching.bdim_at_front(x, dim, mapped.size)
    return exchange_p.bind(x, split=split + 1, concat=concat + 1, **params), 0


def _among_mapped(x, *, axis, ranks, split, concat):
    """The exchange of ranks that are the first axis of `x`."""
    exchange = functools.partial(
        lax.all_to_all, axis_name=axis, split_axis=split, concat_axis=concat, tiled=True
    )
    groups = x.reshape(-1, ranks, *x.shape[1:])
    return lax.collapse(jax.vmap(jax.vmap(exchange, axis_name=axis))(groups), 0, 2)


exchange_p = Primitive("grouped_all_to_all")
exchange_p.def_impl(lambda x, **params: _exchange(**params)(x))
exchange_p.def_abstract_eval(lambda x, **params: _exchange(**params).trace(x).out_avals)
ad.deflinear2(exchange_p, _transpose)
batching.fancy_primitive_batchers[exchange_p] = _batch
mlir.register_lowering(
    exchange_p,
    lambda ctx, x, **params: mlir.lower_fun(_exchange(**params), False)(ctx, x),
)
