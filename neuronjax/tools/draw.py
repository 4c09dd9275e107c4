"""Pictures of what sees what in attention.

No mask is written here: the public function is called with scores that are all equal
(`q = k = 0`) and one-hot values, so that entry `j` of query `i`'s output is the weight
of key `j`. What its weights lack to 1 belongs to the sink.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives.attention.decode_config import AttnTKGConfig
from neuronjax.primitives.attention.decode_tkg import attention_tkg
from neuronjax.primitives.attention.prefill import attention_cte
from neuronjax.tools.picture import Part, Picture

MOST = 2048  # columns: the values of a picture are a square of them


def attention_picture(
    q_len: int,
    kv_len: int | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sink: bool = False,
    prior: int = 0,
    used: int | None = None,
    pack: Sequence[int] = (),
    cp_degree: int | None = None,
    cp_offset: int | None = None,
    strided: bool = False,
) -> Picture:
    """What the queries of `attention_cte` see.

    Args:
        q_len: queries; with context parallelism those of one device.
        kv_len: keys; as many as queries unless given.
        causal: as `causal_mask`.
        window: as `sliding_window`: keys that a query sees, itself among them.
        sink: whether there is a sink, whose logit is 0 here.
        prior: slots of the prefix; 0 is none.
        used: how many of them are in use; all unless given.
        pack: lengths of the sequences that are packed into one, in tokens.
        cp_degree: as `global_cp_deg`: devices that share the queries.
        cp_offset: position of the first query; 0 unless given.
        strided: the queries are every `cp_degree`th token.

    Returns:
        The picture; the columns are prefix, keys, sink.

    Raises:
        ValueError: the sizes do not fit, or `attention_cte` refuses the call.

    Example:
        >>> print(attention_picture(2, 3, sink=True))
        attention_cte: 2 queries, 3 keys, causal, sink
                 keys    sink
                 0 1 2   0
        query 0  ■ · ·   ■
        query 1  ■ ■ ·   ■
    """
    kv_len = q_len if kv_len is None else kv_len
    used = prior if used is None else used
    _check(q_len, kv_len, prior, used, pack)
    if (strided or cp_offset is not None) and cp_degree is None:
        raise ValueError("draw: cp_offset and strided need cp_degree, got None")
    values = jnp.eye(prior + kv_len)[None]
    options: dict[str, Any] = dict(causal_mask=causal, sliding_window=window)
    words = [f"{q_len} queries", f"{kv_len} keys"] + ["causal"] * causal
    words += [f"window {window}"] * bool(window)
    if prior:
        words.append(f"prior {used} of {prior}")
        options |= _prior(values[:, :prior], used)
    if sink:
        words.append("sink")
        options |= dict(sink=jnp.zeros((1, 1)))
    if pack:
        words.append(f"packed {'+'.join(map(str, pack))}")
        options |= _bounds(pack)
    first, step = cp_offset or 0, cp_degree if strided and cp_degree else 1
    if cp_degree is not None:
        stride = f"every {cp_degree}th" if strided else f"a {cp_degree}th part"
        words.append(f"{stride}, from {first}")
        options |= _part_of_a_sequence(first, cp_degree, strided)
    q, k = jnp.zeros((1, q_len, 1)), jnp.zeros((1, 1, kv_len))
    out: Any = attention_cte(q, k, values[:, prior:], **options)
    parts = [Part("prior", range(prior)), Part("keys", range(kv_len))]
    rows = range(first, first + q_len * step, step)
    return _picture("attention_cte: " + ", ".join(words), out[0], rows, parts, sink)


def _prior(values: Any, used: int) -> dict[str, Any]:
    """The options of a prefix with these values."""
    return dict(
        k_prior=jnp.zeros((1, 1, values.shape[1])),
        v_prior=values,
        prior_used_len=jnp.asarray([used], jnp.int32),
    )


def _part_of_a_sequence(first: int, degree: int, strided: bool) -> dict[str, Any]:
    """The options of the queries of one device."""
    return dict(
        cp_offset=jnp.asarray([[first]], jnp.int32),
        global_cp_deg=degree,
        cp_strided_q_slicing=strided,
    )


def decode_picture(
    slots: int,
    position: int,
    *,
    active: int = 1,
    window: int | None = None,
    sink: bool = False,
    block_len: int = 0,
    table: Sequence[int] = (),
) -> Picture:
    """What the new tokens of `attention_tkg` see of a cache, by position ids.

    Args:
        slots: slots of the cache that count; the last `active` of them stand for the
            new tokens.
        position: of the first new token: the slots before it are filled.
        active: new tokens.
        window: tokens that a new one sees, itself among them. A flat cache is circular
            then, in all slots but the last `active`, and `position` has no end; a block
            cache is not.
        sink: whether there is a sink, whose logit is 0 here.
        block_len: slots of a block; 0 for a flat cache.
        table: the blocks of the sequence, in its order; as they lie unless given.

    Returns:
        The picture; the columns are the slots where they lie, the new tokens, the sink.

    Raises:
        ValueError: the sizes do not fit, or `attention_tkg` refuses the call.

    Example:
        >>> print(decode_picture(6, 2, active=2))
        attention_tkg: position 2, 6 slots, 2 new
                 cache         new
                 0 1 2 3 4 5   0 1
        query 2  ■ ■ · · · ·   ■ ·
        query 3  ■ ■ · · · ·   ■ ■
    """
    _check_decode(slots, position, active, window, block_len, table)
    words = [f"position {position}", f"{slots} slots", f"{active} new"]
    if block_len:
        table = table or range(slots // block_len)
        words.append(f"blocks {','.join(map(str, table))} of {block_len}")
    held = (max(table) + 1) * block_len if block_len else slots
    positions = position + np.arange(active, dtype=np.int32)[None]
    options: dict[str, Any] = dict(rope_pos_ids=jnp.asarray(positions))
    if block_len:
        options |= dict(active_blocks_table=jnp.asarray([table], jnp.uint32))
    if window:
        words.append(f"window {window}")
        options |= _window(positions, window, 0 if block_len else slots - active)
    if sink:
        words.append("sink")
        options |= dict(sink=jnp.zeros((1, 1)))
    cfg = AttnTKGConfig(
        *(1, 1, active, slots, slots, held + active),
        block_len=block_len,
        tp_k_prior=True,
        strided_mm1=not block_len,
        use_pos_id=True,
    )
    values = jnp.eye(held + active)
    cache = (-1, block_len) if block_len else (1, 1, held)
    v_prior = values[:held].reshape(*cache, held + active)
    new = values[held:][None, None]
    zeros = jnp.zeros_like(new), jnp.zeros_like(new), new, jnp.zeros_like(v_prior)
    out, _ = attention_tkg(*zeros, v_prior, None, cfg, **options)
    size = block_len or held
    names = [f"cache {i}" if block_len else "cache" for i in range(held // size)]
    parts = [
        *(Part(n, range(i * size, (i + 1) * size)) for i, n in enumerate(names)),
        Part("new", range(active)),
    ]
    title = "attention_tkg: " + ", ".join(words)
    return _picture(title, out[0, 0].T, positions[0].tolist(), parts, sink)


def _window(positions: np.ndarray, window: int, around: int) -> dict[str, Any]:
    """Position ids and window starts in a cache of `around` circular slots, or flat."""
    starts = np.maximum(positions - window + 1, 0)
    if around:
        starts, positions = starts % around, positions % around
    return dict(rope_pos_ids=jnp.asarray(positions), start_pos_ids=jnp.asarray(starts))


def _picture(title: str, out: Any, rows: Any, parts: list[Part], sink: bool) -> Picture:
    weights = np.asarray(out, np.float64)
    if sink:
        # A sink that took part has the weight of a key; less is a rounding error.
        rest = 1 - weights.sum(1, keepdims=True)
        rest = np.where(rest > 0.5 / (weights.shape[1] + 1), rest, 0)
        weights = np.concatenate([weights, rest], 1)
        parts = [*parts, Part("sink", range(1))]
    return Picture(title, weights, rows, [part for part in parts if part.columns])


def _bounds(pack: Sequence[int]) -> dict[str, Any]:
    """First and end column of each query's own sequence, `[tokens, 1]` float32."""
    ends = np.cumsum(pack)
    rows = {"bound_min": ends - pack, "bound_max": ends}
    spread = {name: np.repeat(x, pack)[:, None] for name, x in rows.items()}
    return {name: jnp.asarray(x.astype(np.float32)) for name, x in spread.items()}


def _check(q_len: int, kv_len: int, prior: int, used: int, pack: Sequence[int]) -> None:
    """Refuses what has no picture; `attention_cte` refuses the rest."""
    if min(q_len, kv_len) < 1 or max(q_len, kv_len + prior) > MOST or prior < 0:
        raise ValueError(
            f"draw: q_len and kv_len must be at least 1 and at most {MOST}, a prior "
            f"among the keys, got q_len = {q_len}, kv_len = {kv_len}, prior = {prior}"
        )
    if not 0 <= used <= prior:
        raise ValueError(f"draw: used must be in [0, prior = {prior}], got {used}")
    if pack and (min(pack) < 1 or sum(pack) != q_len):
        raise ValueError(
            f"draw: pack must be lengths that add to q_len = {q_len}, got {list(pack)}"
        )


def _check_decode(
    slots: int,
    position: int,
    active: int,
    window: int | None,
    block_len: int,
    table: Sequence[int],
) -> None:
    """Refuses what has no picture; `attention_tkg` refuses the rest."""
    circular = bool(window) and not block_len
    most = position if circular else slots - active
    if not 0 < active <= slots <= MOST or not 0 <= position <= most:
        raise ValueError(
            f"draw: slots must be at most {MOST} and hold active and position, got "
            f"slots = {slots}, active = {active}, position = {position}"
        )
    if window is not None and not 0 <= window <= slots - active:
        raise ValueError(
            f"draw: window must be in [0, slots - active = {slots - active}], got "
            f"{window}"
        )
    if table and not block_len:
        raise ValueError("draw: table needs block_len, got 0")
    if block_len < 0 or (block_len and slots % block_len):
        raise ValueError(
            f"draw: block_len must divide slots = {slots}, got {block_len}"
        )
    if table and (len(table) * block_len != slots or min(table) < 0):
        raise ValueError(
            f"draw: table must list {slots // block_len} blocks, got {list(table)}"
        )
    if table and (max(table) + 1) * block_len > MOST:
        raise ValueError(f"draw: the blocks must have at most {MOST} slots together")
