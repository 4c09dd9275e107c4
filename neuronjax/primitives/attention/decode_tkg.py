"""`attention_tkg`: decode attention by the vendor's names and layouts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num, Shaped

from neuronjax.kernels.attention.decode_masks import as_int32, causal_window
from neuronjax.primitives.attention.decode import emit_decode
from neuronjax.primitives.attention.decode_config import AttnTKGConfig
from neuronjax.primitives.attention.decode_facts import tkg_facts
from neuronjax.primitives.attention.decode_tkg_rules import RULES
from neuronjax.primitives.contracts import add, contracted


@contracted(tkg_facts)
def attention_tkg(
    q: Float[Array, "..."],
    k_active: Shaped[Array, "..."],
    v_active: Shaped[Array, "batch 1 seq head_dim"],
    k_prior: Shaped[Array, "..."],
    v_prior: Shaped[Array, "..."],
    mask: Shaped[Array, "_ batch num_heads seq"] | None,
    cfg: AttnTKGConfig,
    inv_freqs: Float[Array, "half 1"] | None = None,
    rope_pos_ids: Num[Array, "batch seq"] | None = None,
    start_pos_ids: Num[Array, "batch seq"] | None = None,
    sink: Float[Array, "num_heads 1"] | None = None,
    active_blocks_table: Integer[Array, "batch blocks"] | None = None,
) -> tuple[Array, Array | None]:
    r"""Attends from a few new tokens to a cache and to themselves.

    $$o_t = \frac{\sum_j e^{\langle q_t, k_j \rangle} v_j}{e^{\mathrm{sink}} + \sum_j
    e^{\langle q_t, k_j \rangle}}$$

    over the slots that are seen; without `sink` that term is 0. Of the first
    `curr_sprior` slots the last `s_active` stand for the new tokens, wherever a
    sequence ends. No scale is applied without `fuse_rope`: scale `q` first.

    With `use_pos_id` the cache is visible below `rope_pos_ids[b, 0]`, and of the new
    tokens what `mask` shows, or without a mask those up to the query itself. With
    `start_pos_ids` too, query `t` sees the cache slots from `start_pos_ids[b, t]` on;
    where the start is greater than the end, the window goes around: slots from the
    start on, and slots below the end. A window `W` over a flat cache that wraps after
    `M` slots, `W <= M <= curr_sprior - s_active` (the last slots are never read), has
    the start `max(0, pos + t - W + 1) % M` and the position ids `(pos + t) % M`; over a
    block cache neither is reduced. A window that begins among the new tokens shows none
    of the cache; which new tokens it shows is the mask's matter.

    Args:
        q: `[B, Hq, s, d]`, or `[d, B*Hq*s]` if `cfg.qk_in_sb`.
        k_active: `[B, 1, s, d]`, or `[d, B*s]`.
        v_active: `[B, 1, s, d]`.
        k_prior: `[B+, 1, d, slots]`, or `[B+, 1, slots, d]` if `cfg.tp_k_prior`. Rows
            past `B` are ignored. With a table `[num_blocks, block_len, d]`.
        v_prior: `[B+, 1, slots, d]`, or `[num_blocks, block_len, d]`.
        mask: boolean or integer, `[curr_sprior, B, Hq, s]` in token order, nonzero =
            attend; with `use_pos_id` `[s, B, Hq, s]` as (key, batch, head, query), or
            `None`. `mask_to_token_order` brings the chip's orders here.
        cfg: sizes and layouts.
        inv_freqs: `[d/2, 1]`, angles per position, radians; for `fuse_rope`.
        rope_pos_ids: `[B, s]`, positions; for `fuse_rope` and `use_pos_id`. Whole
            numbers, of any dtype.
        start_pos_ids: `[B, s]`, the first slot that each query sees; for `use_pos_id`.
        sink: `[Hq, 1]`, one more logit of each head, without a value. It is neither
            scaled nor masked; -inf is no sink.
        active_blocks_table: `[B, curr_sprior / block_len]`, any integer dtype: the
            blocks of each sequence, in order; several may share one. -1 (0xFFFFFFFF in
            uint32) is no block: its slots are not seen. Any other number outside of
            `[0, num_blocks)` is an error where the table is known while tracing;
            under `jit` it is no block either, and never another one.

    Returns:
        `(out, k_out)`: `[B, Hq, d, s]`, or `[d, B*Hq*s]` if `cfg.out_in_sb`, in the
        dtype of `q`; and with `fuse_rope` the rotated keys `[B, 1, d, s]`, or `[d,
        B*s]` if `cfg.k_out_in_sb`, else `None`. A query that sees nothing gets 0.
        Slots that nobody sees, unlisted blocks and spare rows may hold anything and
        get the gradient 0. Keys and values in `float8_e4m3` enter as they are, and are
        constants. Checkpoint names are `attention_tkg_out`, `_neg_max`, `_recip` and,
        with `fuse_rope`, `_k_out`.

    Raises:
        ValueError: shapes, sizes or dtypes do not fit; a needed operand is missing.

    Source:
        aws-neuron/nki-library, `core/attention/attention_tkg.py`; for the sink Xiao et
        al. 2023, https://arxiv.org/abs/2309.17453, section 3.

    Example:
        >>> import jax.numpy as jnp
        >>> q, new, cache = jnp.zeros((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2)), 3.0
        >>> cache = jnp.full((2, 2, 2), cache)
        >>> cfg = AttnTKGConfig(1, 1, 1, 2, 2, 2, 2, tp_k_prior=True)
        >>> out, _ = attention_tkg(
        ...     *(q, new, new, cache, cache, jnp.ones((2, 1, 1, 1), bool), cfg),
        ...     active_blocks_table=jnp.array([[1]]),
        ... )
        >>> out.ravel()
        Array([2., 2.], dtype=float32)
    """
    if cfg.qk_in_sb:
        sizes = cfg.d_head, cfg.bs, cfg.q_head, cfg.s_active
        q = jnp.moveaxis(q.reshape(sizes), 0, -1)
        k_active = jnp.moveaxis(k_active.reshape(cfg.d_head, cfg.bs, 1, -1), 0, -1)
    if active_blocks_table is not None:
        k_prior, v_prior = k_prior[:, None], v_prior[:, None]
    positions = None if rope_pos_ids is None else as_int32(rope_pos_ids)
    lengths, starts = _window(positions, start_pos_ids, cfg)
    out, k_out = emit_decode(
        *(q, k_active, v_active, k_prior, v_prior),
        mask=mask,
        lengths=lengths,
        prior_slots=cfg.curr_sprior - cfg.s_active,
        tp_k_prior=cfg.tp_k_prior,
        inv_freqs=inv_freqs if cfg.fuse_rope else None,
        rope_pos_ids=positions if cfg.fuse_rope else None,
        sink=sink,
        starts=starts,
        table=active_blocks_table,
    )
    if k_out is not None:
        k_out = _head_first(k_out) if cfg.k_out_in_sb else k_out.mT
    return _head_first(out.mT) if cfg.out_in_sb else out, k_out


def _window(positions, start_pos_ids, cfg: AttnTKGConfig):
    """Where the visible part of the cache ends and starts; `None` where it does not."""
    if not cfg.use_pos_id:
        return None, None
    if start_pos_ids is None:
        return positions[:, 0], None
    starts = as_int32(start_pos_ids)
    if cfg.stale_slots_visible:
        return positions, starts
    starts, ends = causal_window(starts, positions)
    return ends[:, 0], starts


def _head_first(x: Array) -> Array:
    """`[B, H, s, d]` to `[d, B*H*s]`."""
    return jnp.moveaxis(x, -1, 0).reshape(x.shape[-1], -1)


add(*RULES)
