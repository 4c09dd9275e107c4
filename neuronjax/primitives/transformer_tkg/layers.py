"""All layers of a decode step: one after another, or as a scan over stacked ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from neuronjax.kernels.shard_common import settled
from neuronjax.kernels.stacked import is_narrow, layer_at
from neuronjax.primitives.transformer_tkg.caches import written
from neuronjax.primitives.transformer_tkg.layer import DecodeLayer, Tokens, decode_layer
from neuronjax.primitives.transformer_tkg.residual import Links


def decode_layers(
    h: jax.Array,
    layers: Sequence[DecodeLayer] | DecodeLayer,
    caches: tuple[Any, Any],
    tokens: Tokens,
    links: Links,
) -> tuple[jax.Array, tuple[Any, Any]]:
    """The residual behind all layers, and their caches with the new tokens in them.

    Args:
        h: `[batch, seq, d_model]`, alike on all ranks and cores.
        layers: a list of layers, which are traced one by one; or one whose every array
            has a leading axis of layers, which is scanned.
        caches: keys and values: a list of each, or each with a leading axis of layers.
        tokens: what is known about the new tokens; without a position the caches come
            back as they were.
        links: the ranks and cores.
    """
    if isinstance(layers, DecodeLayer):
        return _scanned(h, layers, caches, tokens, links)
    update, held = tokens.position is not None, []
    for layer, pair in zip(layers, zip(*caches, strict=True), strict=True):
        h, stored = decode_layer(h, layer, pair, tokens, links, update=update)
        held.append(stored if update else pair)
    k_caches, v_caches = zip(*held, strict=True)
    return h, ([*k_caches], [*v_caches])


def _scanned(h, layers, caches, tokens, links):
    """The caches are read in the loop and written behind it, all layers at once.

    So each is there once, and donated it is updated in place.
    """
    leaves, tree = jax.tree.flatten((layers, caches))
    narrow = [is_narrow(x.dtype) for x in leaves]
    # The gradient of a stack that is scanned is the stack of the gradients; that of one
    # that is read by index is a sum over layers of whole stacks.
    stacks = [x for x, is_read in zip(leaves, narrow, strict=True) if is_read]
    scanned = [x for x, is_read in zip(leaves, narrow, strict=True) if not is_read]

    def body(h, turn):
        i, own = turn
        parts = iter(layer_at(stacks, i)), iter(own)
        layer, pair = tree.unflatten(next(parts[not n]) for n in narrow)
        return decode_layer(h, layer, pair, tokens, links, update=False)

    rows = jnp.arange(leaves[0].shape[0], dtype=jnp.int32)
    first = rows[0], [x[0] for x in scanned]
    h = settled(lambda h: body(h, first)[0], h, h, *leaves, *tokens)
    h, new = lax.scan(body, h, (rows, scanned))
    if tokens.position is None:
        return h, caches
    return h, written(caches, new, tokens.position)
