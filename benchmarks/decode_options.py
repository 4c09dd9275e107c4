"""Decode attention with a sink, a circular window and block tables, by models' shapes.

Inputs are `[batch, seq, num_heads, head_dim]`, caches `[batch, slots, num_kv_heads,
head_dim]` or `[blocks, block_len, num_kv_heads, head_dim]` with a table; each side gets
them in the layout that it documents. The new tokens come beside the cache. A side
without sinks gets one as one more key, as in `attention_options`.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Work,
    Workload,
    jax_work,
    slow_bfloat16,
    torch_work,
)

_PLAIN = dict(batch=4, num_kv_heads=1, new=1, window=0, block_len=0, sink=False)
# One key head of the model with its group of query heads; batch, new tokens, slots and
# blocks as the vendor runs them.
_SHAPES = {
    "llama3.1-70b_16384": dict(num_heads=8, new=5, head_dim=128, slots=16384),
    "llama-76b_10240": dict(num_heads=8, new=5, head_dim=128, slots=10240),
    "gpt-oss_sink_1024": dict(batch=8, num_heads=8, head_dim=64, slots=1024, sink=True),
    "gpt-oss_window_128_1024": dict(
        batch=8, num_heads=8, head_dim=64, slots=1024, sink=True, window=128
    ),
    "window_512_16384": dict(num_heads=8, head_dim=128, slots=16384, window=512),
    "block_16_4096": dict(num_heads=8, new=7, head_dim=64, slots=4096, block_len=16),
}
CASES = {
    f"{name}_{dtype}": _PLAIN | shape | dict(dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for name, shape in _SHAPES.items()
}


def ideal(case: Case) -> dict[str, float]:
    """Reads what is seen of the cache once; two products for every query."""
    seen = case["window"] or case["slots"] * 3 // 4
    cache = case["batch"] * case["num_kv_heads"] * seen * case["head_dim"]
    group = case["num_heads"] // case["num_kv_heads"]
    size = 2 if case["dtype"] == "bfloat16" else 4
    return {"flops": 4.0 * cache * group * case["new"], "bytes": 2.0 * size * cache}


def _inputs(case: Case) -> dict[str, Any]:
    """Float32 operands, and what is seen: a first and an end slot, and a table.

    Three quarters of the slots are filled and a little more in each further sequence;
    a window has gone around, so that it begins at the cache's end.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    batch, new, slots = case["batch"], case["new"], case["slots"]

    def draw(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    arrays: dict[str, Any] = dict(
        q=draw(batch, new, case["num_heads"], case["head_dim"])
    )
    heads = case["num_kv_heads"], case["head_dim"]
    for name in ("k_active", "v_active"):
        arrays[name] = draw(batch, new, *heads)
    cache = batch, slots
    if case["block_len"]:
        cache = batch * slots // case["block_len"], case["block_len"]
        arrays["table"] = rng.permutation(cache[0]).reshape(batch, -1).astype(np.int32)
    for name in ("k_prior", "v_prior"):
        arrays[name] = draw(*cache, *heads)
    if case["sink"]:
        arrays["sink"] = draw(case["num_heads"])
    ends = slots * 3 // 4 + np.arange(batch, dtype=np.int32)
    starts = np.zeros_like(ends)
    if case["window"]:
        # The new token itself is one of the window's.
        ends = case["window"] // 2 + np.arange(batch, dtype=np.int32)
        starts = (ends - case["window"] + 1) % slots
    return arrays | dict(starts=starts, ends=ends)


def _arrays(case: Case) -> dict[str, Any]:
    """The same as arrays of JAX, floats in the case's dtype."""
    import jax.numpy as jnp

    return {
        name: jnp.asarray(x, case["dtype"] if x.dtype.kind == "f" else x.dtype)
        for name, x in _inputs(case).items()
    }


def _seen(xp: Any, case: Case, starts: Any, ends: Any) -> Any:
    """What is seen, `[batch, new, slots + new]`; of the new tokens those up to it."""
    slot = xp.arange(case["slots"])
    starts, ends = starts[:, None], ends[:, None]
    straight = (slot >= starts) & (slot < ends)
    around = (slot >= starts) | (slot < ends)
    cached = xp.where(starts <= ends, straight, around)[:, None]
    cached = xp.broadcast_to(cached, (case["batch"], case["new"], case["slots"]))
    causal = xp.arange(case["new"])[:, None] >= xp.arange(case["new"])
    causal = xp.broadcast_to(causal, (case["batch"], *causal.shape))
    return xp.concatenate([cached, causal], 2)


def _seq_major(attention: Callable) -> Callable[[Case], Work]:
    """A function of `q, k, v, bias, mask`, cache and new tokens joined for it."""

    def build(case: Case) -> Work:
        import jax.numpy as jnp

        named = _arrays(case)

        def run(operands):
            joined = []
            for name in "kv":
                cache = operands[f"{name}_prior"]
                if "table" in operands:
                    cache = cache[operands["table"]]
                    cache = cache.reshape(case["batch"], -1, *cache.shape[3:])
                joined.append(jnp.concatenate([cache, operands[f"{name}_active"]], 1))
            mask, bias = _seen(jnp, case, operands["starts"], operands["ends"]), None
            if "sink" in operands:
                one_more = (0, 0), (0, 1), (0, 0), (0, 0)
                joined = [jnp.pad(x, one_more) for x in joined]
                mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 1)), constant_values=True)
                before = (0, 0), (0, 0), (mask.shape[2] - 1, 0)
                bias = jnp.pad(operands["sink"][:, None, None], before)[None]
            return attention(operands["q"], *joined, bias, mask[:, None])

        return jax_work(run, named)

    return build


def _jax_nn(q, k, v, bias, mask):
    import jax

    return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation="xla")


def _tokamax(q, k, v, bias, mask):
    import tokamax

    return tokamax.dot_product_attention(q, k, v, bias, mask, implementation="xla")


def _torch(case: Case) -> Work:
    import numpy as np
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    given = _inputs(case)
    seen = _seen(np, case, given.pop("starts"), given.pop("ends"))
    mask = torch.from_numpy(np.ascontiguousarray(seen))[:, None]
    table = given.pop("table", None)
    dtype = getattr(torch, case["dtype"])
    # [batch, num_heads, seq, head_dim], as PyTorch wants a cache to lie.
    order = ("q", "k_active", "v_active", "k_prior", "v_prior")
    arrays = [
        torch.from_numpy(given[name]).transpose(1, 2).contiguous().to(dtype)
        for name in order
    ]
    blocks = None if table is None else torch.from_numpy(table).long()

    def attention(q, k, v, k_prior, v_prior):
        joined = []
        for cache, new in ((k_prior, k), (v_prior, v)):
            if blocks is not None:
                cache = cache[blocks].transpose(1, 2).flatten(2, 3)
            joined.append(torch.cat([cache, new], 2))
        out = scaled_dot_product_attention(q, *joined, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return torch_work(attention, [*arrays, None], backward=False)


def _neuronjax(case: Case) -> Work:
    """The emitter of `AttentionTkgFwd`; the keys of a flat cache lie transposed."""
    import jax.numpy as jnp

    from neuronjax.emit import attention_tkg_fwd_kernel

    named = _arrays(case)
    for name in ("q", "k_active", "v_active", "k_prior", "v_prior"):
        named[name] = named[name].swapaxes(1, 2)
    if not case["block_len"]:
        named["k_prior"] = jnp.array(named["k_prior"].swapaxes(2, 3))

    def run(operands):
        options: dict[str, Any] = dict(lengths=operands["ends"])
        if case["window"]:
            options["start_pos_ids"] = operands["starts"][:, None]
        if case["sink"]:
            options["sink"] = operands["sink"][:, None]
        if case["block_len"]:
            options |= dict(active_blocks_table=operands["table"], tp_k_prior=True)
        scaled = operands["q"] * jnp.asarray(case["head_dim"] ** -0.5, case["dtype"])
        rest = (operands[n] for n in ("k_active", "v_active", "k_prior", "v_prior"))
        return attention_tkg_fwd_kernel(scaled, *rest, **options)

    return jax_work(run, named, outputs=lambda out: [jnp.moveaxis(out, 3, 1)])


def _torch_skip(case: Case) -> str:
    return "no sink but in a float mask" if case["sink"] else slow_bfloat16(case)


WORKLOAD = Workload(
    name="decode_options",
    title="Decode attention with a sink, a window, a block table",
    cases=CASES,
    sides={
        "jax_nn": Side(_seq_major(_jax_nn)),
        "tokamax": Side(_seq_major(_tokamax), "peers"),
        "torch_sdpa": Side(_torch, "torch", skip=_torch_skip),
        "neuronjax": Side(_neuronjax),
    },
    ideal=ideal,
)
