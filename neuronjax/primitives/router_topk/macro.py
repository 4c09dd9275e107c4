"""The macros `RouterTopK` and `RouterTopKBwd`.

Outputs carry the checkpoint names `router_topk_logits`, `router_topk_index`,
`router_topk_affinities` and `router_topk_topk`; the backward reads the first two.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from neuronjax.kernels import router_topk as kernel
from neuronjax.kernels.router_topk_plain import router_topk_plain, router_topk_plain_bwd
from neuronjax.primitives import contracts
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import RouterActFnType, member
from neuronjax.primitives.router_topk.rules import emitter_facts
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

NAME, BACKWARD = "RouterTopK", "RouterTopKBwd"
OPERANDS = ("x", "w", "w_bias", "selection_bias", "token_mask")
OUTPUTS = ("logits", "index", "affinities", "topk")
Operand = Array | MemrefTile


@contracts.contracted(emitter_facts)
def router_topk_kernel(
    x: Operand,
    w: Operand,
    w_bias: Operand | None = None,
    selection_bias: Operand | None = None,
    token_mask: Operand | None = None,
    *,
    act_fn: RouterActFnType | str = "SOFTMAX",
    k: int,
    form: str = "TH",
    pre_norm: bool = True,
    norm_topk: bool = False,
    **hints: Any,
) -> tuple[Operand, ...]:
    """Emits `RouterTopK`, on tensors or on tiles (`is_tiled`).

    Args:
        x: `[T, H]` or `[H, T]`; a tile lies on `H`.
        w: `[H, E]`; a tile lies on `H`.
        w_bias: `[1, E]` or `[E]`; a tile is of `[1, E]`, on `E`.
        selection_bias: `[E]`; a tile lies on it.
        token_mask: `[T]`, True = keep; a tile lies on it.
        act_fn: `SOFTMAX` or `SIGMOID`.
        k: how many experts a token gets.
        form: `"TH"` or `"HT"`.
        pre_norm: as `router_pre_norm` of `router_topk`.
        norm_topk: as `norm_topk_prob` of `router_topk`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        `(logits [T, E], index [T, k], affinities [T, E], selected affinities [T, k])`,
        at least float32 but for the index; for tiles tiles of these, on `T`.
    """
    operands: tuple[Any, ...] = (x, w, w_bias, selection_bias, token_mask)
    is_tiled = is_all_io_type_memref_tile(operands, "router_topk_kernel")
    config = dict(
        form="tiled" if is_tiled else form,
        k=int(k),
        act=member(RouterActFnType, act_fn).name,
        pre_norm=bool(pre_norm),
        norm_topk=bool(norm_topk),
        is_tiled=is_tiled,
        **hints,
    )
    if not is_tiled:
        return router_family(*operands, name=NAME, **config)
    tiles = dict(zip(OPERANDS, operands, strict=True))
    require_partitions("router_topk_kernel", **tiles)
    data = [None if tile is None else tile.data for tile in operands]
    outs = [MemrefTile(out, 0) for out in router_family(*data, name=NAME, **config)]
    named = {f"out_{key}": out for key, out in zip(OUTPUTS, outs, strict=True)}
    require_fit("router_topk_kernel", **tiles, **named)
    return tuple(outs)


def _emit_backward(operands, outs, cotangents, *, name, **config):
    x, w, w_bias, selection_bias, token_mask = operands
    logits, index, *_ = outs
    d_logits, _, d_affinities, d_topk = cotangents
    grads = router_backward(
        *(x, w, w_bias, token_mask),
        *(logits, index, d_logits, d_affinities, d_topk),
        name=BACKWARD,
        has_bias=w_bias is not None,
        **config,
    )
    grads = grads if w_bias is not None else (*grads, None)
    # The selection is a constant: its bias has no gradient.
    d_selection = None if selection_bias is None else jnp.zeros_like(selection_bias)
    return (*grads, d_selection, None)


def _backward_leaf(*operands, name, has_bias, **config):
    return kernel.router_topk_bwd(*operands, name=name, **config)


def _gradients(*, has_bias, **_):
    return ("d_x", "d_w", "d_bias")[: 2 + has_bias]


def _example(name: str, dtype: Any, batch: int) -> Example:
    """A normalized sigmoid with a selection bias and one padding token in two."""
    keys = iter(jax.random.split(jax.random.key(11), 8))
    shapes = dict(x=(2 * batch, 6), w=(6, 5), w_bias=(1, 5), selection_bias=(5,))
    made = {k: jax.random.normal(next(keys), v, dtype) for k, v in shapes.items()}
    mask = jnp.arange(2 * batch) % 3 != 1
    x, w, w_bias, selection_bias = made.values()
    config: dict[str, Any] = dict(
        form="TH", k=2, act="SIGMOID", pre_norm=True, norm_topk=True, is_tiled=False
    )
    operands = (x, w, w_bias, selection_bias, mask)
    if name == NAME:
        return Example(operands, config, (0, None, None, None, 0), (0, 0, 0, 0))
    logits, index, *rest = router_topk_plain(*operands, name=NAME, **config)
    seeds = [jax.random.normal(next(keys), z.shape, z.dtype) for z in (logits, *rest)]
    operands = (x, w, w_bias, mask, logits, index, *seeds)
    split = (0, None, None, *6 * (0,))
    return Example(operands, dict(config, has_bias=True), split, (0, None, None))


router_backward = MacroFamily(
    "router_topk_bwd",
    (BACKWARD,),
    _backward_leaf,
    plain=router_topk_plain_bwd,
    outputs=_gradients,
    example=_example,
)
router_family = MacroFamily(
    "router_topk",
    (NAME,),
    kernel.router_topk_fwd,
    plain=router_topk_plain,
    outputs=OUTPUTS,
    backward=_emit_backward,
    example=_example,
)
