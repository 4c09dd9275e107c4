"""All layers in one scan, forwards and backwards.

The backward keeps the input of each layer and nothing else: a layer is computed again,
but for its last product, when its turn comes.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from neuronjax.kernels.llama3_transformer.heads import full_tables, half_table
from neuronjax.kernels.llama3_transformer.layer import layer_bwd, layer_fwd, zeros_of
from neuronjax.kernels.llama3_transformer.operands import Layer, Operands
from neuronjax.kernels.shard_common import Group, all_reduce, uniform, varying
from neuronjax.kernels.stacked import is_narrow, layer_at


def llama3_transformer_fwd(
    *operands: Array,
    name: str,
    output_kv: bool,
    stored: bool = False,
    static: bool = False,
    **config: Any,
) -> tuple[Array, ...]:
    """Returns what `output_names` lists; the operands are those of `Operands`.

    `out` is `[batch, seq, d_model]`. `k` is `[layers, batch, num_kv_heads, head_dim,
    seq]`, `v` `[layers, batch, num_kv_heads, seq, head_dim]`, `layer_inputs` `[layers,
    batch, seq, d_model]`; all have the dtype of `x`. `static` takes loops of fixed
    length, which can be transposed.
    """
    o, c = Operands(*operands), SimpleNamespace(**config, static=static)
    tables = full_tables(o.cos, o.sin)

    def turn(x, layer):
        out, k, v = layer_fwd(x, layer, tables, c)
        return out, ((k, v) if output_kv else (), x if stored else ())

    out, (kept, inputs) = _scan(turn, o.x, _own_layers(o, c), static)
    return (out, *kept, *((inputs,) if stored else ()))


def llama3_transformer_bwd(
    *args: Array | None, name: str, static: bool = False, **config: Any
) -> tuple[Array, ...]:
    """Returns the cotangents of the ten operands, each in its own dtype.

    Takes the operands, `layer_inputs`, and the cotangents of `out`, `k`, `v` and
    `layer_inputs`, of which all but the first may be `None`. The residual's cotangent
    is wide from layer to layer.
    """
    count, c = len(Operands._fields), SimpleNamespace(**config, static=static)
    o, (inputs, d_out, *d_kept) = Operands(*args[:count]), args[count:]
    tables, layers = full_tables(o.cos, o.sin), _own_layers(o, c)
    sums = zeros_of(tables, o.x, o.w_qkv)
    sums = [uniform(t, o.x, over=c.axis)[0] for t in sums]

    def turn(carry, own):
        (dx, d_cos, d_sin), (layer, x, (d_k, d_v, d_x)) = carry, own
        dx, grads, (cos, sin) = layer_bwd(x, layer, tables, (dx, d_k, d_v), c)
        if d_x is not None:
            dx = dx + d_x.astype(dx.dtype)
        return (dx, d_cos + cos, d_sin + sin), grads

    carry = (d_out.astype(sums[0].dtype), *sums)
    stack = layers, inputs, tuple(d_kept)
    (dx, *d_tables), grads = _scan(turn, carry, stack, static, reverse=True)
    found = (dx, *grads, *map(half_table, d_tables))
    return tuple(_like(g, x, c) for g, x in zip(found, o, strict=True))


def _own_layers(o: Operands, c: Any) -> Layer:
    """The weights; over ranks cast so that each rank's cotangent is its own."""
    if c.axis is None:
        return o.layers
    return Layer(*(uniform(x, over=c.axis)[0] for x in o.layers))


def _like(grad: Array, x: Array, c: Any) -> Array:
    """A cotangent in its operand's dtype, summed over ranks that hold it alike."""
    if c.axis is not None and c.axis in varying(grad) - varying(x):
        grad = all_reduce(grad, Group(c.axis))
    return grad.astype(x.dtype)


def _scan(
    turn: Callable, carry: Any, stack: Any, static: bool, reverse: bool = False
) -> tuple[Any, Any]:
    """A scan over the layers of `stack`.

    Narrow arrays are read by index, out of bytes: XLA on a CPU would widen all layers
    before the loop. Not those of a loop that is transposed: the gradient of a stack
    that is scanned is a stack, that of one read by index a sum of stacks.
    """
    leaves, tree = jax.tree.flatten(stack)
    by_index = [is_narrow(x.dtype) and not static for x in leaves]
    pairs = list(zip(leaves, by_index, strict=True))
    held = [x for x, read in pairs if read]
    scanned = [x for x, read in pairs if not read]

    def body(carry, own):
        i, rows = own
        parts = iter(layer_at(held, i)), iter(rows)
        return turn(carry, tree.unflatten(next(parts[not read]) for read in by_index))

    body = jax.checkpoint(body, prevent_cse=False) if static else body
    numbers = jnp.arange(leaves[0].shape[0], dtype=jnp.int32)
    return lax.scan(body, carry, (numbers, scanned), reverse=reverse)
