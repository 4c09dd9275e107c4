"""RoPE: rotary position embedding, in the kernels' layout and in Hugging Face's."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neuronjax.kernels import rope as kernel
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.macro import Example, MacroFamily


def _rope_facts(call: SimpleNamespace) -> dict[str, Any]:
    d, batch, heads, seq = call.x_in.shape
    return dict(d=d, batch=batch, num_heads=heads, seq=seq)


@contracts.contracted(_rope_facts)
def RoPE(
    x_in: Float[Array, "head_dim batch num_heads seq"],
    cos: Float[Array, "half batch seq"],
    sin: Float[Array, "half batch seq"],
    lnc_shard: bool = False,
    contiguous_layout: bool = True,
    relayout_in_sbuf: bool = False,
) -> Float[Array, "head_dim batch num_heads seq"]:
    r"""Rotates channel pairs by the angles of their positions.

    $$a' = a \cos_i - b \sin_i, \qquad b' = a \sin_i + b \cos_i$$

    The pair `(a, b)` with angle `i` is `(i, i + d/2)` in the half-split (contiguous)
    layout and `(2i, 2i + 1)` in the interleaved one. For `x = [1, 2, 3, 4]` and angles
    `[pi/2, 0]`: half-split `[-3, 2, 1, 4]`, interleaved `[-2, 1, 3, 4]`. The result
    keeps the layout of the input.

    Args:
        x_in: `[d, batch, heads, seq]`, the head dimension first, any floating dtype.
        cos: `[d/2, batch, seq]`, shared by all heads; data, not necessarily a cosine.
        sin: like `cos`.
        lnc_shard: splits `seq` over the cores of a logical core; changes no value.
        contiguous_layout: True for half-split pairs, False for interleaved ones.
        relayout_in_sbuf: how the chip rearranges interleaved pairs; changes no value.

    Returns:
        An array of the shape and dtype of `x_in`. The arithmetic is float32, or float64
        for float64. Its checkpoint name is `rope_out`.

    Raises:
        ValueError: shapes do not fit, or the tables' dtypes differ. The chip takes `d`
            64 or 128 only; here any even `d` runs and `neuronjax.can` reports it.

    Source:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34;
        aws-neuron/nki-library, `core/embeddings/rope.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(4, 1, 1, 1)
        >>> cos = jnp.array([0.0, 1.0]).reshape(2, 1, 1)
        >>> sin = jnp.array([1.0, 0.0]).reshape(2, 1, 1)
        >>> RoPE(x, cos, sin).ravel().tolist()
        [-3.0, 2.0, 1.0, 4.0]
        >>> RoPE(x, cos, sin, contiguous_layout=False).ravel().tolist()
        [-2.0, 1.0, 3.0, 4.0]
    """
    return rope_kernel(
        x_in,
        cos,
        sin,
        interleaved=not contiguous_layout,
        lnc_shard=lnc_shard,
        relayout_in_sbuf=relayout_in_sbuf,
    )


def _hf_facts(call: SimpleNamespace) -> dict[str, Any]:
    tables = call.cos.shape if call.rope_cache is None else call.rope_cache.shape
    batch, _, seq, d = call.q.shape
    width = d if call.rope_cache is None else 2 * d
    return dict(d=d, batch=batch, seq=seq, tables=tables, width=width)


@contracts.contracted(_hf_facts)
def rope_hf(
    q: Float[Array, "batch num_heads seq head_dim"],
    k: Float[Array, "batch num_kv_heads seq head_dim"],
    cos: Float[Array, "*batch seq head_dim"] | None = None,
    sin: Float[Array, "*batch seq head_dim"] | None = None,
    rope_cache: Float[Array, "*batch seq two_head_dim"] | None = None,
    backward: bool = False,
) -> tuple[Array, Array]:
    r"""Rotates queries and keys with full-width tables, half-split pairs.

    $$y = x \cdot \cos + \mathrm{rot}(x) \cdot \sin, \qquad
      \mathrm{rot}([x_1, x_2]) = [-x_2, x_1]$$

    All columns of the tables count: their halves may differ.

    Args:
        q: `[batch, heads, seq, d]`, any floating dtype.
        k: `[batch, kv_heads, seq, d]`.
        cos: `[batch, seq, d]` or `[seq, d]`; cast to the dtype of `q` first.
        sin: like `cos`.
        rope_cache: `[batch, seq, 2d]` or `[seq, 2d]` instead: cosines, then sines.
        backward: apply the transposed map, to gradients of the outputs. The sine is
            then multiplied before the rotation.

    Returns:
        `(q_out, k_out)` with the shapes and dtypes of `q` and `k`. Any `seq` will do;
        that it is a multiple of 128 is a rule of the chip.

    Raises:
        ValueError: shapes do not fit, or not exactly one kind of table is given.

    Source:
        aws-neuron/nki-library, `core/embeddings/rope_hf.py`.
    """
    if rope_cache is not None:
        cos, sin = jnp.split(rope_cache, 2, -1)
    shape = (q.shape[0], q.shape[2], q.shape[3])
    cos, sin = (jnp.broadcast_to(t.astype(q.dtype), shape) for t in (cos, sin))
    if backward:
        return _transposed(q, cos, sin), _transposed(k, cos, sin)
    return rope_kernel(q, cos, sin, full=True), rope_kernel(k, cos, sin, full=True)


def rope_kernel(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    full: bool = False,
    interleaved: bool = False,
    **hints: Any,
) -> Array:
    """Emits the macro `RoPE`: the emitter below `RoPE` and `rope_hf`.

    Args:
        x: `[d, batch, heads, seq]`, or with `full` `[batch, heads, seq, d]`.
        cos: `[d/2, batch, seq]`, or with `full` `[batch, seq, d]`.
        sin: like `cos`.
        full: full-width tables and the head dimension last.
        interleaved: pairs `(2i, 2i + 1)` instead of `(i, i + d/2)`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        An array of the shape and dtype of `x`.
    """
    config = dict(full=full, interleaved=interleaved, **hints)
    return rope(x, cos, sin, name="RoPE", **config)[0]


def _transposed(dy: Array, cos: Array, sin: Array) -> Array:
    # The map is linear in x, so its transpose needs no x: any array will do.
    return rope_backward(
        jnp.zeros_like(dy), cos, sin, dy, name="RoPEBwd", full=True, interleaved=False
    )[0]


def _emit_backward(operands, outs, cotangents, *, name, **config):
    return rope_backward(*operands, *cotangents, name="RoPEBwd", **config)


def _plain_backward(x, cos, sin, dy, *, name, **config):
    plain = functools.partial(kernel.rope_plain, name="RoPE", **config)
    return jax.vjp(plain, x, cos, sin)[1]((dy,))


def _example(name: str, dtype: Any, batch: int) -> Example:
    keys = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(k, (8, batch, 2, 6), dtype) for k in keys[:2])
    cos, sin = (jax.random.normal(k, (4, batch, 6), dtype) for k in keys[2:])
    config = dict(full=False, interleaved=True)
    if name == "RoPE":
        return Example((x, cos, sin), config, (1, 1, 1), (1,))
    return Example((x, cos, sin, dy), config, (1, 1, 1, 1), (1, 1, 1))


rope_backward = MacroFamily(
    "rope_bwd",
    ("RoPEBwd",),
    kernel.rope_bwd,
    plain=_plain_backward,
    outputs=("dx", "dcos", "dsin"),
    example=_example,
)
rope = MacroFamily(
    "rope",
    ("RoPE",),
    kernel.rope_fwd,
    plain=kernel.rope_plain,
    outputs=("out",),
    backward=_emit_backward,
    example=_example,
)


def _arguments(shape=(8, 1, 2, 3), table=(4, 1, 3), **changes):
    x, cos = np.zeros(shape, np.float32), np.zeros(table, np.float32)
    return lambda function: dict(dict(x_in=x, cos=cos, sin=cos), **changes)


def _hf_arguments(shape=(1, 2, 3, 8), table=(1, 3, 8), **changes):
    q, cos = np.zeros(shape, np.float32), np.zeros(table, np.float32)
    return lambda function: dict(dict(q=q, k=q, cos=cos, sin=cos), **changes)


contracts.add(
    Contract(
        "rope.rank",
        ("RoPE",),
        "{function}: x_in must have shape [d, batch, heads, seq], got {x_in.shape}",
        lambda c: c.x_in.ndim != 4,
        example=_arguments(shape=(8, 2, 3)),
        stage=0,
    ),
    Contract(
        "rope.even",
        ("RoPE",),
        "{function}: d of x_in must be even and positive, got {x_in.shape}",
        size=Size("d", lambda c: c.d, multiple=2, minimum=2),
        example=_arguments(shape=(7, 1, 2, 3)),
    ),
    Contract(
        "rope.empty",
        ("RoPE",),
        "{function}: batch, heads and seq of x_in must be positive, got {x_in.shape}",
        lambda c: 0 in c.x_in.shape[1:],
        example=_arguments(shape=(8, 1, 0, 3)),
    ),
    Contract(
        "rope.tables",
        ("RoPE",),
        "{function}: cos and sin must have shape [d/2, batch, seq] = "
        "({d}/2, {batch}, {seq}), got {cos.shape} and {sin.shape}",
        lambda c: {c.cos.shape, c.sin.shape} != {(c.d // 2, c.batch, c.seq)},
        example=_arguments(table=(8, 1, 3)),
    ),
    Contract(
        "rope.table_dtypes",
        ("RoPE",),
        "{function}: cos and sin must have one dtype, got {cos.dtype} and {sin.dtype}",
        lambda c: c.cos.dtype != c.sin.dtype,
        example=_arguments(sin=np.zeros((4, 1, 3), jnp.bfloat16)),
    ),
    Contract(
        "rope.head_dim",
        ("RoPE",),
        "{function}: the chip takes d = 64 or 128 for x_in, got {x_in.shape}",
        size=Size("d", lambda c: c.d, multiple=64, maximum=128),
        example=_arguments(),
        tag="hw",
    ),
    Contract(
        "rope_hf.rank",
        ("rope_hf",),
        "{function}: q and k must have shape [batch, heads, seq, d] and agree in all "
        "but heads, got {q.shape} and {k.shape}",
        lambda c: (
            c.q.ndim != 4
            or c.k.ndim != 4
            or (c.q.shape[0], *c.q.shape[2:]) != (c.k.shape[0], *c.k.shape[2:])
        ),
        example=_hf_arguments(k=np.zeros((1, 2, 3, 6), np.float32)),
        stage=0,
    ),
    Contract(
        "rope_hf.one_table",
        ("rope_hf",),
        "{function}: exactly one of (cos and sin) and rope_cache must be given",
        lambda c: (
            (c.cos is None) != (c.sin is None)
            or (c.cos is None) == (c.rope_cache is None)
        ),
        example=_hf_arguments(sin=None),
        stage=0,
    ),
    Contract(
        "rope_hf.even",
        ("rope_hf",),
        "{function}: d of q must be even and positive, got {q.shape}",
        size=Size("d", lambda c: c.d, multiple=2, minimum=2),
        example=_hf_arguments(shape=(1, 2, 3, 7), table=(1, 3, 7)),
    ),
    Contract(
        "rope_hf.tables",
        ("rope_hf",),
        "{function}: tables must have shape [batch, seq, {width}] or [seq, {width}] = "
        "({batch}, {seq}, {width}), got {tables}",
        lambda c: (
            tuple(c.tables)
            not in {(c.batch, c.seq, c.width), (1, c.seq, c.width), (c.seq, c.width)}
        ),
        example=_hf_arguments(table=(1, 3, 4)),
    ),
    Contract(
        "rope_hf.table_shapes",
        ("rope_hf",),
        "{function}: cos and sin must have one shape, got {cos.shape} and {sin.shape}",
        lambda c: c.cos is not None and c.cos.shape != c.sin.shape,
        example=_hf_arguments(sin=np.zeros((3, 8), np.float32)),
    ),
    Contract(
        "rope_hf.seq",
        ("rope_hf",),
        "{function}: the chip takes seq in multiples of 128, got {q.shape}",
        size=Size("seq", lambda c: c.seq, multiple=128),
        example=_hf_arguments(),
        tag="hw",
    ),
)
