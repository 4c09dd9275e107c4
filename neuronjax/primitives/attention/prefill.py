"""Prefill attention: `attention_cte`, its emitter, and the macros of six NAMEs.

Outputs carry the checkpoint names `attention_out`, `attention_neg_max` and
`attention_recip`, which are all that `BackwardsAttention` reads beside the operands.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from neuronjax.context import settings
from neuronjax.kernels.attention.plain import attention_plain
from neuronjax.kernels.attention.prefill import attention_fwd
from neuronjax.kernels.attention.tiled import attention_tiled_fwd
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives.attention import prefill_rules  # noqa: F401  enters the rows
from neuronjax.primitives.attention.backward import attention_gradients
from neuronjax.primitives.attention.prefill_facts import (
    SWAPPED,
    TILED,
    UNTILED,
    attention_name,
    cte_facts,
    kernel_facts,
)
from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.macro import Example, MacroFamily
from neuronjax.primitives.options import refuses
from neuronjax.primitives.tile import (
    MemrefTile,
    is_all_io_type_memref_tile,
    require_fit,
    require_partitions,
)

Operand = Array | MemrefTile
_INSTEAD = "causal and full attention of q to k and v is"


@refuses(
    _INSTEAD,
    k_prior=None,
    v_prior=None,
    prior_used_len=None,
    sink=None,
    sliding_window=(None, 0),
    cp_offset=None,
    global_cp_deg=(None, 1),
    cp_strided_q_slicing=False,
    bound_min=None,
    bound_max=None,
)
@contracted(cte_facts)
def attention_cte(
    q: Float[Operand, "heads _ _"],
    k: Float[Operand, "kv_heads _ _"],
    v: Float[Operand, "kv_heads kv_seq value_dim"],
    scale: float | Array | None = 1.0,
    causal_mask: bool = True,
    k_prior: None = None,
    v_prior: None = None,
    prior_used_len: None = None,
    sink: None = None,
    sliding_window: int | None = None,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    cache_softmax: bool = False,
    softmax_dtype: DTypeLike = jnp.float32,
    mm_out_dtype: DTypeLike = jnp.float32,
    cp_offset: None = None,
    global_cp_deg: int | None = None,
    cp_strided_q_slicing: bool = False,
    bound_min: None = None,
    bound_max: None = None,
) -> Operand | tuple[Operand, Array, Array]:
    r"""Attention of a whole sequence: the prefill phase, and training.

    $$o_i = \sum_j \frac{e^{z_{ij}}}{\sum_l e^{z_{il}}} v_j, \qquad
      z_{ij} = \mathrm{scale} \cdot \langle q_i, k_j \rangle$$

    With `causal_mask` query `i` sees keys `j <= i`: aligned top-left, whatever the
    lengths are. For `q = k = 0`, `v = [1, 2, 3, 4, 5]` two queries give `[1.0, 1.5]`.

    Batch is folded into the heads, `B*Hq` and `B*Hk`; query head `h` attends with key
    head `h // (Hq / Hk)`: neighbours share one. No temporary has both sequence lengths.

    Args:
        q: `[heads, q_seq, d]`, or `[heads, d, q_seq]` if not `tp_q`; any floating
            dtype. A tile lies on `d`.
        k: `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`. A tile lies on
            `d`.
        v: `[kv_heads, kv_seq, value_dim]`; `value_dim` may differ from `d`. A tile lies
            on `kv_seq`.
        scale: multiplies the scores; folded into `q` in float32. `None` is
            `1/sqrt(d)`; 0 is 0. A number or a scalar array; it changes no dtype.
        causal_mask: see above.
        k_prior: not built yet (prefix caching), refuses; so do `v_prior` and
            `prior_used_len`.
        v_prior: see `k_prior`.
        prior_used_len: see `k_prior`.
        sink: not built yet, refuses.
        sliding_window: not built yet, refuses; `None` and 0 mean no window.
        tp_q: layout of `q`.
        tp_k: layout of `k`.
        tp_out: return `[heads, value_dim, q_seq]`.
        cache_softmax: return the statistics too.
        softmax_dtype: of the statistics: float32 alone (float64 inputs keep float64).
        mm_out_dtype: of the scores: float32 alone.
        cp_offset: not built yet (context parallelism), refuses; so do `global_cp_deg`
            and `cp_strided_q_slicing`.
        global_cp_deg: see `cp_offset`.
        cp_strided_q_slicing: see `cp_offset`.
        bound_min: not built yet (sequence packing), refuses; so does `bound_max`.
        bound_max: see `bound_min`.

    Returns:
        `out`, `[heads, q_seq, value_dim]` in the dtype of `q`, or with `cache_softmax`
        `(out, out_neg_max, out_sum_recip)`: the negative row maximum and the reciprocal
        of the row sum, `[heads, q_seq, 1]`, so that the log-sum-exp is
        `-out_neg_max - log(out_sum_recip)`. All three are differentiable. A key or
        value that a row does not see never reaches it, NaN included.
        `statistics_to_tiles` gives the chip's layout of the statistics.

    Raises:
        ValueError: shapes or dtypes do not fit; the message has every broken rule. The
            chip's limits (`d` at most 128, at most 512 heads) are reported by
            `neuronjax.can` and refused for tiles alone.
        NotImplementedError: an option is not built yet.

    Source:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1;
        aws-neuron/nki-library, `core/attention/attention_cte.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k = jnp.zeros((1, 2, 1)), jnp.zeros((1, 1, 5))
        >>> v = jnp.array([[[1.0], [2.0], [3.0], [4.0], [5.0]]])
        >>> attention_cte(q, k, v).ravel().tolist()
        [1.0, 1.5]
    """
    q = scaled(q, scale, q.shape[2 if tp_q else 1])
    if tp_k and causal_mask:  # the causal form has no swapped variant
        k, tp_k = _turned(k), False
    elif tp_k and tp_q:
        q, tp_q = _turned(q), False
    return attention_kernel(
        q,
        k,
        v,
        is_causal=causal_mask,
        cache_softmax=cache_softmax,
        tp_q=tp_q,
        tp_k=tp_k,
        tp_out=tp_out,
    )


@refuses(
    f"{_INSTEAD}, and attention_tkg_fwd_kernel decodes with a cache",
    prefix_mask=None,
    sink=None,
    k_active=None,
    v_active=None,
    k_prior=None,
    rope_pos_ids=None,
)
@contracted(kernel_facts)
def attention_kernel(
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Array | None = None,
    out: Operand | None = None,
    *,
    active_mask: Array | None = None,
    prefix_mask: None = None,
    attn_out: Operand | None = None,
    scale: float | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    cache_softmax: bool = False,
    sink: None = None,
    q_head: int | None = None,
    batch_size: int | None = None,
    k_active: None = None,
    v_active: None = None,
    k_prior: None = None,
    rope_pos_ids: None = None,
    tp_q: bool = False,
    tp_k: bool = False,
    tp_out: bool = False,
    num_stages: int | None = None,
    num_tiles: int | None = None,
    fuse_batches: bool | None = None,
) -> Operand | tuple[Operand, Array, Array]:
    """Emits one of five attention NAMEs, or for tiles `TiledNativeKernelAttention`.

    `k` as `[heads, kv_seq, d]` forces the swapped form `AttentionMMSoftmaxMM`, which
    takes `q` as `[heads, d, q_seq]`; otherwise `is_causal` and the target generation
    choose. Tiles of `q` and `k` lie on `d`, of `v` on its sequence.

    Args:
        q: `[heads, d, q_seq]`, or `[heads, q_seq, d]` if `tp_q`.
        k: `[kv_heads, d, kv_seq]`, or `[kv_heads, kv_seq, d]` if `tp_k`.
        v: `[kv_heads, kv_seq, value_dim]`.
        mask: `[1 or heads, 1 or q_seq, kv_seq]`, nonzero = keep; it has no gradient. A
            row that sees nothing gives 0, with `neg_max` inf and `recip` 1.
        out: the destination: its shape and dtype are the result's, its values are never
            read.
        active_mask: another word for `mask`.
        prefix_mask: not built yet, refuses.
        attn_out: another word for `out`.
        scale: multiplies the scores, 1 unless given; the causal forms take 1 alone.
        softmax_scale: another word for `scale`.
        is_causal: query `i` sees keys `j <= i`.
        cache_softmax: return `neg_max` and `recip`, `[heads, q_seq, 1]`, too.
        sink: not built yet, refuses.
        q_head: query heads of one sequence; with `batch_size` checked against `q`.
        batch_size: sequences.
        k_active: refuses: decoding is another emitter's; so do `v_active`, `k_prior`
            and `rope_pos_ids`.
        v_active: see `k_active`.
        k_prior: see `k_active`.
        rope_pos_ids: see `k_active`.
        tp_q: layout of `q`.
        tp_k: layout of `k`.
        tp_out: return `[heads, value_dim, q_seq]`.
        num_stages: a scheduling hint; changes no value.
        num_tiles: a scheduling hint; changes no value.
        fuse_batches: tiles only: several batches share one grid; changes no value.

    Returns:
        `[heads, q_seq, value_dim]` in the dtype of `q` or of the destination; for tiles
        a tile of it on `q_seq`.
    """
    tiled = is_all_io_type_memref_tile((q, k, v), "attention_kernel")
    mask = active_mask if mask is None else mask
    scale = softmax_scale if scale is None else scale
    destination = attn_out if out is None else out
    hints = dict(num_stages=num_stages, num_tiles=num_tiles, fuse_batches=fuse_batches)
    config: dict[str, Any] = dict(
        scale=1.0 if scale is None else float(scale),
        is_causal=bool(is_causal),
        is_tiled=tiled,
        tp_q=tp_q,
        tp_k=tp_k,
        tp_out=tp_out,
        **{key: value for key, value in hints.items() if value is not None},
    )
    if tiled:
        return _emit_tiled(q, k, v, destination, config)
    name = attention_name(config["is_causal"], tp_k, settings().target)
    mask = None if mask is None else jnp.asarray(mask).astype(bool)
    attended, *statistics = attention(q, k, v, mask, name=name, **config)
    if destination is not None:
        attended = attended.astype(destination.dtype)
    return (attended, *statistics) if cache_softmax else attended


def _emit_tiled(q, k, v, destination, config):
    tiles = dict(q=q, k=k, v=v)
    require_partitions("attention_kernel", **tiles)
    data = (tile.data for tile in tiles.values())
    attended = attention(*data, None, name=TILED, **config)[0]
    if destination is not None:
        attended = attended.astype(destination.dtype)
    out = MemrefTile(attended, 2 if config["tp_out"] else 1)
    require_fit("attention_kernel", **tiles, out=out)
    return out


def scaled(x: Operand, scale: Any, d: int) -> Any:
    """`x * scale`, formed in float32 and rounded once; `None` is `1/sqrt(d)`."""
    if isinstance(x, MemrefTile):
        return MemrefTile(scaled(x.data, scale, d), x.axis, x.buffer)
    if scale is None:
        scale = d**-0.5
    if not isinstance(scale, jax.Array):
        scale = float(scale)
        if scale == 1.0:
            return x
    acc = accumulator(x.dtype)
    return (x.astype(acc) * jnp.asarray(scale, acc)).astype(x.dtype)


def _turned(x: Operand) -> Operand:
    """The last two axes exchanged; the data of a tile lies as it lay."""
    if isinstance(x, MemrefTile):
        return MemrefTile(x.data, 3 - x.axis, x.buffer)
    return jnp.swapaxes(x, 1, 2)


def statistics_to_tiles(statistics: Float[Array, "heads q_seq 1"]) -> Array:
    """Row statistics in the chip's layout.

    Args:
        statistics: `[heads, q_seq, 1]`; `q_seq` is a multiple of 128.

    Returns:
        `[heads, 128, q_seq / 128]`: element `[h, p, g]` is query `g * 128 + p`.

    Raises:
        ValueError: `q_seq` is not a multiple of 128.

    Example:
        >>> import jax.numpy as jnp
        >>> statistics_to_tiles(jnp.arange(256.0).reshape(1, 256, 1))[0, 3]
        Array([  3., 131.], dtype=float32)
    """
    if statistics.ndim != 3 or statistics.shape[1] % 128:
        raise ValueError(
            "statistics_to_tiles: statistics must have shape [heads, q_seq, 1] with "
            f"q_seq a multiple of 128, got {statistics.shape}"
        )
    return jnp.swapaxes(statistics.reshape(statistics.shape[0], -1, 128), 1, 2)


def statistics_from_tiles(statistics: Float[Array, "heads 128 _"]) -> Array:
    """The inverse of `statistics_to_tiles`.

    Args:
        statistics: `[heads, 128, q_seq / 128]`.

    Returns:
        `[heads, q_seq, 1]`.
    """
    return jnp.swapaxes(statistics, 1, 2).reshape(statistics.shape[0], -1, 1)


def _leaf(q, k, v, mask, *, name, is_tiled, is_causal, static=False, **config):
    if is_tiled:
        return attention_tiled_fwd(q, k, v, name=name, is_causal=is_causal, **config)
    return attention_fwd(q, k, v, mask, name=name, static=static, **config)


def _static_leaf(*operands, **config):
    return _leaf(*operands, static=True, **config)


def _plain(q, k, v, mask, *, name, is_tiled, is_causal, **config):
    if not is_tiled:
        return attention_plain(q, k, v, mask, name=name, **config)
    q, k, v = _tensors(q, k, v)
    layout = dict(config, tp_q=True, tp_k=True, tp_out=False)
    form = attention_name(is_causal, False, "gen3")
    outs = attention_plain(q, k, v, None, name=form, **layout)
    return tuple(MemrefTile.from_tensor(x, 1).data for x in outs)


def _tensors(q, k, v):
    """Operand tiles as `[heads, seq, width]`."""
    tiles = MemrefTile(q, 2), MemrefTile(k, 2), MemrefTile(v, 1)
    return (tile.to_tensor() for tile in tiles)


def _emit_backward(operands, outs, cotangents, *, name, is_tiled, **config):
    q, k, v, mask = operands
    config = dict(config, name=name)
    if not is_tiled:
        args = (q, k, v, mask, *outs, *cotangents)
        return *attention_gradients(*args, **config), None
    # BackwardsAttention has no tiled NAME: it reads tensors and its gradients are
    # laid out again.
    config |= dict(tp_q=True, tp_k=True, tp_out=False)
    rows = [
        None if x is None else MemrefTile(x, 1).to_tensor()
        for x in (*outs, *cotangents)
    ]
    grads = attention_gradients(*_tensors(q, k, v), None, *rows, **config)
    axes = (2, 2, 1)
    tiles = map(MemrefTile.from_tensor, grads, axes)
    return *(tile.data for tile in tiles), None


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 4)
    if name == TILED:
        shapes = (8, 1, 2 * batch, 6), (8, 1, batch, 6), (6, 1, batch, 5)
    elif name == SWAPPED:
        shapes = (2 * batch, 8, 6), (batch, 7, 8), (batch, 7, 5)
    else:
        shapes = (2 * batch, 6, 8), (batch, 8, 7), (batch, 7, 5)
    q, k, v = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys[:3], shapes, strict=True)
    )
    config: dict[str, Any] = dict(
        scale=1.0 if "Causal" in name else 0.5,
        is_causal="Causal" in name or name == TILED,
        is_tiled=name == TILED,
        tp_q=name != SWAPPED,
        tp_k=name == SWAPPED,
        tp_out=name == SWAPPED,
    )
    if name == TILED:
        return Example((q, k, v, None), config, (2, 2, 2), (2, 2, 2))
    if name != SWAPPED:
        return Example((q, k, v, None), config, (0, 0, 0), (0, 0, 0))
    mask = jax.random.bernoulli(keys[3], 0.6, (2 * batch, 6, 7)).at[:, 2].set(False)
    return Example((q, k, v, mask), config, (0, 0, 0, 0), (0, 0, 0))


attention = MacroFamily(
    "attention",
    (*UNTILED, TILED),
    _leaf,
    plain=_plain,
    outputs=("out", "neg_max", "recip"),
    backward=_emit_backward,
    static=_static_leaf,
    guard=(SWAPPED, TILED),
    example=_example,
)
