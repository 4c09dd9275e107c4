"""Attention over a ring: keys and values travel past the queries, and none are kept.

Every device holds one part of the sequence. At hop `s` device `r` of `n` has the keys
of device `r - s`, and what it does with them is one macro, of which it keeps the row
statistics: parts of a row are merged by their log-sum-exps. Liu, Zaharia and Abbeel
2023, https://arxiv.org/abs/2310.01889.

Who sees what is a first and a last key of each row, so a part that no row sees costs no
arithmetic: the macro's loops are empty there. Every device permutes at every hop,
whatever it sees, and nothing waits for what another device computes.

What crosses the wire. Forward: `n - 1` collective permutes of the keys and as many of
the values. Backward: the same again, `n` of the gradient of each, in float32: they
travel with the part that they belong to, and then home. With a window in natural order
only the hops that reach a key count. The hops between the first and the last are one
`lax.scan`, so a program is as long for 64 devices as for 3. Each sends the part in
hand on before it computes with it, and gradients that are whole travel meanwhile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from neuronjax.kernels.attention.options import Extras
from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.shard_common import uniform
from neuronjax.primitives.attention.backward_macro import attention_gradients
from neuronjax.primitives.attention.prefill import attention_cte, scaled
from neuronjax.primitives.attention.prefill_extras import as_bounds, non_default
from neuronjax.primitives.contracts import can
from neuronjax.primitives.mesh_axes import bound_size
from neuronjax.sharding.attention_operands import require_axes_of_heads, sequence_axis

_NAME = "ring_attention"


def ring_attention(
    q: Float[Array, "batch num_heads _ _"],
    k: Float[Array, "batch num_kv_heads _ _"],
    v: Float[Array, "batch num_kv_heads kv_seq value_dim"],
    *,
    axis: str = "context",
    strided: bool = False,
    scale: float | Array | None = 1.0,
    causal_mask: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    tp_q: bool = True,
    tp_k: bool = False,
    tp_out: bool = False,
    **others: Any,
) -> Array:
    r"""Attention of a device's queries to the whole sequence, inside `jax.shard_map`.

    $$o_i = \frac{\sum_p e^{m_p - m} l_p\, o_{p,i}}{\sum_p e^{m_p - m} l_p}, \qquad
      m = \max_p m_p$$

    over the parts `p` of the keys, where `o_p` is the attention of the row to that
    part, `m_p` the maximum of its scores there and `l_p` the sum of
    `e^(score - m_p)`. They are merged in float32 (float64 for float64 inputs).

    The backward is a ring too, from the saved result and statistics: at no time does a
    device hold more than two parts of the keys and values, and of their gradients.
    Differentiating twice takes JAX's own derivative of both rings, which keeps what
    passed. Forward mode works over reverse mode alone; by itself JAX refuses it.

    Args:
        q: this device's queries, `[B, Hq, Sq / n, d]`; the last two axes as
            `attention_cte` takes them.
        k: its keys, `[B, Hk, d, Sk / n]`, likewise; of the dtype of `q`.
        v: its values, `[B, Hk, Sk / n, value_dim]`.
        axis: the mesh axis of `n` devices that splits the sequence.
        strided: device `r` has the tokens `r, r + n, r + 2n, ...`, the order of
            `stride_sequence`; with a causal mask all devices then have equal work.
            Otherwise it has consecutive ones.
        scale: as in `attention_cte`.
        causal_mask: query `i` of the whole sequence sees keys up to `i`.
        sliding_window: likewise as in `attention_cte`.
        logits_soft_cap: likewise.
        tp_q: layout of `q`.
        tp_k: layout of `k`.
        tp_out: return `[B, Hq, value_dim, Sq / n]`.
        **others: refused; `context_parallel_attention` has all of `attention_cte`.

    Returns:
        `[B, Hq, Sq / n, value_dim]` in the dtype of `q`. A row that sees nothing gives
        0. A part's result is rounded to that dtype before it is merged, and a part of
        the gradients before it is added. Checkpoint names are `ring_attention_out`,
        `ring_attention_neg_max` and `ring_attention_recip`.

    Raises:
        ValueError: `axis` is no axis of a `shard_map` around the call, an option is
            not one of these, or `attention_cte` would refuse a part.

    Source:
        Liu, Zaharia and Abbeel 2023, https://arxiv.org/abs/2310.01889, algorithm 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from neuronjax.sharding import make_mesh, ring_attention
        >>> P = jax.sharding.PartitionSpec
        >>> q, k = jnp.zeros((1, 1, 2, 1)), jnp.zeros((1, 1, 1, 2))
        >>> v = jnp.array([[[[1.0], [2.0]]]])
        >>> rows, columns = P(None, None, "context"), P(None, None, None, "context")
        >>> ring = jax.shard_map(ring_attention, mesh=make_mesh(context=1),
        ...     in_specs=(rows, columns, rows), out_specs=rows)
        >>> ring(q, k, v).ravel().tolist()
        [1.0, 1.5]
    """
    layout = dict(tp_q=bool(tp_q), tp_k=bool(tp_k), tp_out=bool(tp_out))
    call = dict(layout, scale=scale, causal_mask=causal_mask)
    call |= dict(sliding_window=sliding_window, logits_soft_cap=logits_soft_cap)
    _require(q, k, v, axis, call, others)
    options = non_default(sliding_window, logits_soft_cap)
    ring = _Ring(
        axis=axis,
        queries=q.shape[sequence_axis("q", layout)],
        keys=v.shape[2],
        causal=bool(causal_mask),
        strided=bool(strided),
        window=options.get("window", 0),
        soft_cap=options.get("soft_cap", 0.0),
        **layout,
    )
    lead = q.shape[:2]
    folded = (lax.collapse(x, 0, 2) for x in (scaled(q, scale, _width(q, tp_q)), k, v))
    out = _attend(ring, *uniform(*folded, over=axis))
    return out.reshape(*lead, *out.shape[1:])


class _Ring(NamedTuple):
    """What is known of a call before any value is.

    Attributes:
        axis: the mesh axis of the ring.
        queries: rows of a device.
        keys: keys of a device.
        causal: row `i` sees keys up to its own position.
        strided: a device has every n-th token.
        window: how many keys a row sees; 0 for all.
        soft_cap: 0 for none.
        tp_q: layout of the queries; so `tp_k` and `tp_out`.
    """

    axis: str
    queries: int
    keys: int
    causal: bool
    strided: bool
    window: int
    soft_cap: float
    tp_q: bool
    tp_k: bool
    tp_out: bool

    @property
    def layout(self) -> dict[str, bool]:
        return dict(tp_q=self.tp_q, tp_k=self.tp_k, tp_out=self.tp_out)

    @property
    def hops(self) -> int:
        """How many parts come by: no more than reach into the window of a row."""
        ranks = lax.axis_size(self.axis)
        if not self.window or self.strided or self.queries != self.keys:
            return ranks
        return min(ranks, 1 - (1 - self.window) // max(self.keys, 1))

    def sent(self, x: Any, by: int = 1) -> Any:
        """A tree of arrays from the device `by` places before, round the ring."""
        ranks = lax.axis_size(self.axis)
        pairs = [(i, (i + by) % ranks) for i in range(ranks)]
        return lax.ppermute(x, self.axis, pairs)

    def bounds(self, hop: Any) -> tuple[Any, Any]:
        """The first key of the part in hand that each row sees; one past the last."""
        if not self.causal:
            return None, None
        ranks, rank = lax.axis_size(self.axis), lax.axis_index(self.axis)
        rank = rank.astype(jnp.int32)
        source = (rank - hop) % ranks
        step = ranks if self.strided else 1
        if not self.strided:
            rank, source = rank * self.queries, source * self.keys
        # By how many positions a row is behind the first key of the part.
        rows = jnp.arange(self.queries, dtype=jnp.int32)
        behind = rank - source + step * rows
        most = behind // step + 1
        least = (behind - self.window) // step + 1 if self.window else 0 * most
        return least[:, None], most[:, None]


class _Rows(NamedTuple):
    """Attention of each row to some of the keys, in float32, and its statistics."""

    out: Array
    neg_max: Array
    recip: Array


def _out(ring: _Ring, q: Array, k: Array, v: Array) -> Array:
    return _forward(ring, q, k, v)[0]


def _forward(ring: _Ring, q: Array, k: Array, v: Array):
    """The result, and what the backward reads."""

    def work(hop, keys, rows):
        part = _part(ring, hop, q, keys)
        return (part if rows is None else _merged(rows, part, ring.tp_out)), ()

    rows, _ = _round(ring, (k, v), work, None)
    rows = rows._replace(out=rows.out.astype(q.dtype))
    names = (f"{_NAME}_{field}" for field in _Rows._fields)
    rows = tuple(map(checkpoint_name, rows, names))
    return rows[0], (q, k, v, *rows)


def _backward(ring: _Ring, saved: tuple, d_out: Array):
    """Every part gets its gradients from the statistics of all of them."""
    q, k, v, *rows = saved
    acc = accumulator(q.dtype)
    config = dict(ring.layout, **non_default(None, ring.soft_cap))

    def work(hop, keys, dq):
        least, most = as_bounds(*ring.bounds(hop), ring.keys)
        extras = Extras(bound_min=least, bound_max=most)
        stored = (*rows, d_out, None, None)
        grads = attention_gradients(
            q, keys[0], keys[1], extras, *stored, scale=1.0, is_causal=False, **config
        )
        more, *parts = (x.astype(acc) for x in grads[:3])
        return (more if dq is None else dq + more), parts

    dq, sums = _round(ring, (k, v), work, None)
    return tuple(
        x.astype(like.dtype) for x, like in zip((dq, *sums), (q, k, v), strict=True)
    )


# A scan that is differentiated in reverse may inline `_forward`. Its own derivative is
# right too: only what the second derivative holds in memory differs.
_attend = jax.custom_vjp(_out, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _round(ring: _Ring, keys: Any, work: Callable, state: Any) -> tuple[Any, Any]:
    """Works on every part of the keys that comes by.

    Args:
        ring: who is in it.
        keys: this device's part.
        work: `work(hop, keys, state)` gives the next state and what is added to the
            sums that travel with these keys.
        state: what `work` gets at hop 0.

    Returns:
        The last state, and the sums of this device's own keys.
    """
    last = ring.hops - 1
    coming = ring.sent(keys) if last else keys
    state, sums = work(0, keys, state)
    if not last:
        return state, sums

    def turn(hop, keys, state, sums):
        sums = ring.sent(sums)
        state, parts = work(hop, keys, state)
        return state, jax.tree.map(jnp.add, sums, parts)

    def step(carry, hop):
        keys, *rest = carry
        coming = ring.sent(keys)
        return (coming, *turn(hop, keys, *rest)), None

    carry = coming, state, sums
    if last > 1:
        carry, _ = lax.scan(step, carry, jnp.arange(1, last, dtype=jnp.int32))
    state, sums = turn(last, *carry)
    return state, ring.sent(sums, -last)


def _part(ring: _Ring, hop: Any, q: Array, keys: tuple[Array, Array]) -> _Rows:
    """One macro on the part in hand."""
    least, most = ring.bounds(hop)
    out, *statistics = attention_cte(
        *(q, *keys),
        causal_mask=False,
        cache_softmax=True,
        logits_soft_cap=ring.soft_cap or None,
        bound_min=least,
        bound_max=most,
        **ring.layout,
    )
    return _Rows(out.astype(accumulator(q.dtype)), *statistics)


def _merged(a: _Rows, b: _Rows, tp_out: bool) -> _Rows:
    """Rows that saw the keys of both; a row that saw none of a part has weight 0 there.

    The maximum and the sum stay apart: beside a maximum of 1e6 the logarithm of the sum
    would round away. The result does not depend on the maximum, which is held constant.
    """
    neg_max = lax.stop_gradient(jnp.minimum(a.neg_max, b.neg_max))

    def total(part):
        seen = part.neg_max != jnp.inf
        z = jnp.where(seen, neg_max - part.neg_max, 0)
        return jnp.where(seen, jnp.exp(z) / part.recip, 0)

    totals = total(a), total(b)
    whole = totals[0] + totals[1]
    recip = 1 / jnp.where(whole == 0, 1, whole)
    shares = [x * recip for x in totals]
    x, y = (share.mT if tp_out else share for share in shares)
    return _Rows(x * a.out + y * b.out, neg_max, recip)


def _width(q: Array, tp_q: bool) -> int:
    return q.shape[3 if tp_q else 2]


def _require(
    q: Any, k: Any, v: Any, axis: Any, call: dict[str, Any], others: dict[str, Any]
) -> None:
    """Refuses what a ring has not, and what `attention_cte` would."""
    if others:
        raise ValueError(
            f"{_NAME}: a ring has no {', '.join(sorted(others))}; "
            "context_parallel_attention has all options of attention_cte"
        )
    if bound_size(axis) is None:
        raise ValueError(
            f"{_NAME}: axis must be a mesh axis of the shard_map around the call, got "
            f"{axis!r}"
        )
    require_axes_of_heads(_NAME, dict(q=q, k=k, v=v))
    folded = (
        jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype)
        for x in (q, k, v)
    )
    report = can(attention_cte, *folded, **call)
    lines = [x.message for x in report.violations if x.tag == "math"]
    if lines:
        raise ValueError("\n".join(lines).replace("attention_cte", _NAME))
