"""Rotary position embedding, in the kernels' layout and in Hugging Face's."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.primitives import contracts
from neuronjax.primitives.rope.macro import rope_kernel, transposed
from neuronjax.primitives.rope.rules import facts, hf_facts


@contracts.contracted(facts)
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
        ValueError: shapes do not fit, the tables' dtypes differ, an operand is not
            floating, or a setting is not True or False. The chip takes `d` 64 or 128
            only; here any even `d` runs and `neuronjax.can` reports it.

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


@contracts.contracted(hf_facts)
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
        ValueError: shapes do not fit, not exactly one kind of table is given, an
            operand is not floating, or `backward` is not True or False.

    Source:
        aws-neuron/nki-library, `core/embeddings/rope_hf.py`.
    """
    if rope_cache is not None:
        cos, sin = jnp.split(rope_cache, 2, -1)
    shape = (q.shape[0], q.shape[2], q.shape[3])
    cos, sin = (jnp.broadcast_to(t.astype(q.dtype), shape) for t in (cos, sin))
    if backward:
        return transposed(q, cos, sin), transposed(k, cos, sin)
    return rope_kernel(q, cos, sin, full=True), rope_kernel(k, cos, sin, full=True)
