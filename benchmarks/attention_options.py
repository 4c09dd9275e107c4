"""Prefill attention with windows, prefixes and sinks, and in the shapes of real models.

Inputs are `[batch, seq, num_heads, head_dim]`; each side lays them out as it documents.
A side without sinks gets one as one more key: zero, with a zero value, and the sink as
its bias. Cases named after models keep head sizes, groups and sequences; heads (and
where said the batch) are fewer, so that a side that keeps all scores fits in memory.
"""

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Work,
    Workload,
    jax_forward_backward,
    jax_work,
    slow_bfloat16,
    torch_work,
)

_PLAIN = dict(
    batch=1, kv_seq=0, prior=0, used=0, offset=0, window=0, sink=False, causal=True
)
# Without and with a window, at the two lengths at which peers fit and at a long one.
_WINDOWS = {
    f"window_{window or 'none'}_{seq}": dict(
        num_heads=heads, num_kv_heads=heads, head_dim=64, seq=seq, window=window
    )
    for seq, heads in ((4096, 4), (16384, 2))
    for window in (128, 1024, 0)
}
_OPTIONS = {
    "sink_4096": dict(num_heads=4, num_kv_heads=4, head_dim=64, seq=4096, sink=True),
    "prefix_2048": dict(
        num_heads=8, num_kv_heads=8, head_dim=64, seq=2048, prior=2048, used=1537
    ),
}
# Query heads, key heads: of the model, then here.
_MODELS = {
    # 64, 8: 8, 1. The vendor's prefix lengths.
    "llama3-70b_prefix_2048": dict(
        num_heads=8, num_kv_heads=1, head_dim=128, seq=2048, prior=2048, used=1537
    ),
    # 64, 8: 1, 1, as the vendor runs it.
    "llama3-70b_prefix_8192": dict(
        num_heads=1, num_kv_heads=1, head_dim=128, seq=8192, prior=4096, used=900
    ),
    # 64, 8: 8, 1.
    "gpt-oss_prefix_4096": dict(
        num_heads=8,
        num_kv_heads=1,
        head_dim=64,
        seq=4096,
        prior=2048,
        used=2003,
        sink=True,
    ),
    "gpt-oss_prefix_window_4096": dict(
        num_heads=8,
        num_kv_heads=1,
        head_dim=64,
        seq=4096,
        prior=2048,
        used=2003,
        sink=True,
        window=128,
    ),
    # 64, 8: 16, 8, the last of sixteen contiguous parts of a sequence.
    "gpt-oss_context_parallel_16384": dict(
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        seq=1024,
        kv_seq=16384,
        offset=15360,
        window=128,
    ),
    # 64, 8: 8, 1.
    "gpt-oss-20b_4096": dict(
        num_heads=8, num_kv_heads=1, head_dim=64, seq=4096, sink=True, window=128
    ),
    # 32, 8: 8, 2.
    "qwen3-8b_4096": dict(num_heads=8, num_kv_heads=2, head_dim=128, seq=4096),
    # 64, 8: 8, 1.
    "qwen3-32b_4096": dict(num_heads=8, num_kv_heads=1, head_dim=128, seq=4096),
    # 32, 8: 4, 1.
    "llama3.1-8b_8192": dict(num_heads=4, num_kv_heads=1, head_dim=128, seq=8192),
    # 16, 8: 2, 1; the layers without a window, without the cap of the scores.
    "gemma2-9b_8192": dict(num_heads=2, num_kv_heads=1, head_dim=256, seq=8192),
    # Not causal; two sequences of one head, as the vendor runs it.
    "vision_577": dict(
        batch=2, num_heads=1, num_kv_heads=1, head_dim=88, seq=577, causal=False
    ),
}
CASES = {
    f"{name}_{mode}_{dtype}": _PLAIN | case | dict(mode=mode, dtype=dtype)
    for dtype in ("float32", "bfloat16")
    for mode in ("forward", "backward")
    for name, case in (_WINDOWS | _OPTIONS | _MODELS).items()
}


def _visible(case: Case) -> int:
    """Pairs of a query and a key that it sees, of one head."""
    keys = case["kv_seq"] or case["seq"]
    if not case["causal"]:
        return case["seq"] * keys
    most = case["window"] or case["used"] + keys
    first = case["used"] + case["offset"] + 1
    return sum(min(first + i, most) for i in range(case["seq"]))


def ideal(case: Case) -> dict[str, float]:
    """Two products of the visible pairs forward, five more backward."""
    backward = case["mode"] == "backward"
    heads, d = case["batch"] * case["num_heads"], case["head_dim"]
    keys = (case["kv_seq"] or case["seq"]) + case["used"]
    held = heads * case["seq"] + case["batch"] * case["num_kv_heads"] * keys
    size = 2 if case["dtype"] == "bfloat16" else 4
    return {
        "flops": 2.0 * heads * _visible(case) * d * (7 if backward else 2),
        "bytes": 2.0 * held * d * size * (2 if backward else 1),
    }


def _inputs(case: Case) -> dict[str, Any]:
    """Float32 operands by name, and the cotangent last."""
    import numpy as np

    rng = np.random.default_rng(0)
    kv_seq = case["kv_seq"] or case["seq"]
    sizes = dict(q=case["seq"], k=kv_seq, v=kv_seq)
    if case["prior"]:
        sizes |= dict(k_prior=case["prior"], v_prior=case["prior"])
    sizes["cotangent"] = case["seq"]
    arrays = {}
    for name, seq in sizes.items():
        own = "num_heads" if name in ("q", "cotangent") else "num_kv_heads"
        shape = case["batch"], seq, case[own], case["head_dim"]
        arrays[name] = rng.standard_normal(shape, dtype=np.float32)
    if case["sink"]:
        sink = rng.standard_normal(case["num_heads"], dtype=np.float32)
        arrays = {"sink": sink} | arrays
    return arrays


def _jax_work(case: Case, f: Callable, named: dict, outputs: Callable) -> Work:
    """`f` of the operands by name; gradients of all of them."""
    *names, _ = named

    def ordered(*operands):
        return f(dict(zip(names, operands, strict=True)))

    args = list(named.values())
    if case["mode"] == "backward":
        return jax_forward_backward(ordered, *args, outputs=lambda o: outputs(names, o))
    return jax_work(ordered, *args[:-1], outputs=lambda o: outputs(names, [o]))


def _seq_major(attention: Callable[..., Any]) -> Callable[[Case], Work]:
    """An `attention(q, k, v, bias, mask, **options)` in the order of the inputs."""

    def build(case: Case) -> Work:
        import jax.numpy as jnp

        named = {k: jnp.asarray(x, case["dtype"]) for k, x in _inputs(case).items()}

        def run(operands):
            return attention(*_one_call(case, **operands))

        return _jax_work(case, run, named, lambda names, outs: list(outs))

    return build


def _one_call(case: Case, q, k, v, sink=None, k_prior=None, v_prior=None):
    """`q, k, v, bias, mask, options`: prefix and sink as further keys."""
    import jax.numpy as jnp

    window = case["window"]
    if k_prior is None and sink is None and not case["offset"]:
        options: dict[str, Any] = dict(is_causal=case["causal"])
        if window:
            options["local_window_size"] = (window - 1, 0)
        return q, k, v, None, None, options
    bias, mask = None, _seen(jnp, case)
    if k_prior is not None:
        k, v = (jnp.concatenate(x, 1) for x in ((k_prior, k), (v_prior, v)))
    if sink is not None:
        k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        mask = jnp.pad(mask, ((0, 0), (0, 1)), constant_values=True)
        bias = jnp.pad(sink[:, None, None], ((0, 0), (0, 0), (k.shape[1] - 1, 0)))[None]
    return q, k, v, bias, mask[None, None], {}


def _jax_nn(q, k, v, bias, mask, options):
    import jax

    return jax.nn.dot_product_attention(
        q, k, v, bias, mask, implementation="xla", **options
    )


def _tokamax(q, k, v, bias, mask, options):
    import tokamax

    return tokamax.dot_product_attention(
        q, k, v, bias, mask, implementation="xla_chunked", **options
    )


def _torch(case: Case) -> Work:
    """Scaled dot products with an explicit mask, or causal without one."""
    import numpy as np
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    named = {
        name: torch.from_numpy(x).to(getattr(torch, case["dtype"]))
        for name, x in _inputs(case).items()
    }
    *names, _ = named
    plain = not (case["window"] or case["prior"] or case["offset"])
    mask = None if plain else torch.from_numpy(_seen(np, case))

    def attention(*operands):
        given = dict(zip(names, operands, strict=True))
        k, v = given["k"], given["v"]
        if "k_prior" in given:
            k = torch.cat([given["k_prior"], k], 1)
            v = torch.cat([given["v_prior"], v], 1)
        heads_major = [x.transpose(1, 2) for x in (given["q"], k, v)]
        out = scaled_dot_product_attention(
            *heads_major,
            attn_mask=mask,
            is_causal=plain and case["causal"],
            enable_gqa=case["num_heads"] != case["num_kv_heads"],
        )
        return out.transpose(1, 2)

    backward = case["mode"] == "backward"
    return torch_work(attention, list(named.values()), backward=backward)


def _seen(xp: Any, case: Case) -> Any:
    """What is seen, `[q_seq, prior + kv_seq]`, as an array of numpy or jax.numpy."""
    before, used = case["prior"], case["used"]
    column = xp.arange(before + (case["kv_seq"] or case["seq"]))
    row = case["offset"] + xp.arange(case["seq"])[:, None]
    # The unused slots of a prefix count for no position.
    position = xp.where(column < before, column - used, column - before)
    seen = (column < used) | ((column >= before) & (position <= row))
    return seen & (position > row - case["window"]) if case["window"] else seen


def _neuronjax(devices: int) -> Callable[[Case], Work]:
    """`attention_cte`, or with devices `sharded_attention` over the heads."""

    def build(case: Case) -> Work:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import neuronjax
        from neuronjax.sharding import make_mesh, sharded_attention

        def laid_out(name, x):
            if name == "sink":
                return x[None, :, None].repeat(case["batch"], 0)
            x = x.swapaxes(1, 2)
            return np.ascontiguousarray(x.swapaxes(2, 3)) if name[0] == "k" else x

        named = {
            name: jnp.asarray(laid_out(name, x), case["dtype"])
            for name, x in _inputs(case).items()
        }
        static: dict[str, Any] = dict(
            scale=case["head_dim"] ** -0.5,
            causal_mask=case["causal"],
            sliding_window=case["window"] or None,
        )
        if case["prior"]:
            static["prior_used_len"] = jnp.asarray([case["used"]], jnp.int32)
        if case["offset"]:
            static["cp_offset"] = jnp.asarray([[case["offset"]]], jnp.int32)
            static["global_cp_deg"] = 16
        if devices > 1:
            mesh = make_mesh(tensor=devices)
            split = jax.NamedSharding(mesh, jax.P(None, "tensor"))
            named = {name: jax.device_put(x, split) for name, x in named.items()}

        def run(operands):
            if devices > 1:
                return sharded_attention(mesh, **operands, **static)
            folded = {n: jax.lax.collapse(x, 0, 2) for n, x in operands.items()}
            out = neuronjax.attention_cte(**folded, **static)
            return out.reshape(case["batch"], -1, *out.shape[1:])

        return _jax_work(case, run, named, _shared)

    return build


def _shared(names: list[str], outs: Any) -> list:
    """Outputs in the order of the inputs' axes."""
    import numpy as np

    arrays = []
    for name, x in itertools.zip_longest(["out", *names], outs):
        if x is None:
            break
        x = np.asarray(x)
        if name == "sink":
            arrays.append(x.sum((0, 2)))
        elif name[0] == "k":
            arrays.append(np.moveaxis(x, 3, 1))
        else:
            arrays.append(x.swapaxes(1, 2))
    return arrays


def _too_large(case: Case) -> str:
    """A side that keeps all scores keeps three of them forward, eight backward."""
    columns = case["prior"] + (case["kv_seq"] or case["seq"])
    scores = 4 * case["batch"] * case["num_heads"] * case["seq"] * columns
    held = scores * (8 if case["mode"] == "backward" else 3) / 2**30
    return f"keeps all scores: about {held:.0f} GB" if held > 10 else ""


def _torch_skip(case: Case) -> str:
    sink = "no sink but in a mask of all scores" if case["sink"] else ""
    return sink or slow_bfloat16(case)


def _one_key_head(case: Case) -> str:
    return "one key head" if case["num_kv_heads"] % 2 else ""


WORKLOAD = Workload(
    name="attention_options",
    title="Attention with a window, a prefix, a sink",
    cases=CASES,
    sides={
        "jax_nn": Side(_seq_major(_jax_nn), skip=_too_large),
        "tokamax_chunked": Side(_seq_major(_tokamax), "peers", skip=_too_large),
        "torch_sdpa": Side(_torch, "torch", skip=_torch_skip),
        "neuronjax": Side(_neuronjax(1)),
        "neuronjax_2dev": Side(_neuronjax(2), devices=2, skip=_one_key_head),
    },
    ideal=ideal,
)
