"""`llama3_transformer` and the emitter of `Llama3Transformer`."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neuronjax.primitives.contracts import contracted
from neuronjax.primitives.llama3_transformer import rules  # noqa: F401  enters the rows
from neuronjax.primitives.llama3_transformer.facts import AXES, facts
from neuronjax.primitives.llama3_transformer.macro import (
    NAME,
    llama3_transformer_family,
)

Matrices = Sequence[Float[Array, "d_in d_out"]] | Float[Array, "layers d_in d_out"]
Result = Array | tuple[Array, Array, Array]


@contracted(facts)
def llama3_transformer(
    X: Float[Array, "batch seq d_model"],
    W_qkvs: Matrices,
    W_outs: Matrices,
    W_gates: Matrices,
    W_ups: Matrices,
    W_downs: Matrices,
    W_gamma_qkvs: Matrices,
    W_gamma_mlps: Matrices,
    RoPE_cos: Float[Array, "half batch seq"],
    RoPE_sin: Float[Array, "half batch seq"],
    *,
    eps: float = 1e-6,
    qkv_order: str = "group",
    output_kv: bool = False,
    axis: str | None = None,
) -> Result:
    r"""All layers of a Llama 3 decoder over whole sequences, as one macro.

    $$h \leftarrow h + \sum_{ranks} \mathrm{attention}(\mathrm{norm}(h))\, W_o, \qquad
      h \leftarrow h + \sum_{ranks}
        (\mathrm{silu}(n W_g) \cdot n W_u)\, W_d, \quad n = \mathrm{norm}(h)$$

    The counterpart of `transformer_tkg` for prefill and training. Attention is causal,
    with half-split rotation and scale `D ** -0.5`; `N` query heads share `G` key/value
    heads, query head `i` that of `i // (N/G)`. Both norms are RMSNorms over `H` with
    gains. No norm follows the last layer. A row that is padded on the right leaves what
    comes before its padding as it is.

    Differentiation: to all ten operands. It keeps the input of each layer, `layers * B
    * S * H` values in the dtype of `X`, and computes a layer again, but for its last
    product, when its turn comes.

    Over ranks: called inside `shard_map`, each call is one rank, with its own query
    heads, key/value heads and columns of `I`; `X`, gains and tables are alike on all
    ranks of `axis`, and so is what comes out. Two all-reduces a layer, of parts that
    are rounded to the dtype of `X`; in the backward three, one of them to compute the
    layer again.

    Args:
        X: `[B, S, H]`, any floating dtype of at least 16 bits. The residual is rounded
            to it behind every half layer.
        W_qkvs: `[layers, H, (N + 2*G)*D]`, or a list of layers, which are stacked
            first; so may be all weights and gains.
        W_outs: `[layers, N*D, H]`, rows in the order of the query heads.
        W_gates: `[layers, H, I]`.
        W_ups: `[layers, H, I]`.
        W_downs: `[layers, I, H]`.
        W_gamma_qkvs: `[layers, 1, H]`, the gain of the norm in front of attention.
        W_gamma_mlps: `[layers, 1, H]`, that of the norm in front of the MLP.
        RoPE_cos: `[D/2, B, S]`, of the positions of the tokens. All of it counts: it
            need not be a cosine.
        RoPE_sin: the same.
        eps: added to the mean squares; finite, at least 0.
        qkv_order: how the columns of `W_qkvs` lie: `"group"`, for one key/value head
            after another its `N/G` query heads, the key head and the value head, as
            `transformer_tkg` has them; or `"kind"`, all query heads, then key heads,
            then value heads, as `qkv` has them.
        output_kv: return keys and values of all layers too.
        axis: the mesh axis of the ranks; `None` for one rank.

    Returns:
        `[B, S, H]`, or with `output_kv` `(output, K, V)`: keys `[layers, B, G, D, S]`,
        rotated, and values `[layers, B, G, S, D]`, as the caches of `transformer_tkg`
        hold them. All in the dtype of `X`.

    Raises:
        ValueError: shapes, dtypes, settings or the axis break a rule; the message has
            every broken one. Limits of the chip are reported by `neuronjax.can` alone.

    Source:
        The leaf `llama3_transformer` of the Neuron compiler, whose source is not
        public; Touvron et al. 2023, https://arxiv.org/abs/2302.13971, section 2.2;
        Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.2.

    Example:
        >>> import jax.numpy as jnp
        >>> X, gain, table = jnp.ones((1, 2, 2)), jnp.ones((1, 2)), jnp.ones((1, 1, 2))
        >>> qkv, w = jnp.tile(jnp.eye(2), 3), jnp.eye(2)
        >>> output, K, V = llama3_transformer(
        ...     X,
        ...     [qkv],
        ...     [w],
        ...     [w],
        ...     [w],
        ...     [w],
        ...     [gain],
        ...     [gain],
        ...     table,
        ...     table * 0,
        ...     output_kv=True,
        ... )
        >>> [f"{x:.3f}" for x in output.ravel()], V[0, 0, 0].round().tolist()
        (['2.731', '2.731', '2.731', '2.731'], [[1.0, 1.0], [1.0, 1.0]])
    """
    given = W_qkvs, W_outs, W_gates, W_ups, W_downs, W_gamma_qkvs, W_gamma_mlps
    stacks = (_stacked(x) for x in given)
    return llama3_transformer_kernel(
        *(X, *stacks, RoPE_cos, RoPE_sin),
        eps=eps,
        qkv_order=qkv_order,
        output_kv=output_kv,
        axis=axis,
    )


def _stacked(x: Any) -> Array:
    return jnp.stack(x) if isinstance(x, list | tuple) else jnp.asarray(x)


@contracted(facts)
def llama3_transformer_kernel(
    X: Float[Array, "batch seq d_model"],
    W_qkvs: Float[Array, "layers d_model columns"],
    W_outs: Float[Array, "layers rows d_model"],
    W_gates: Float[Array, "layers d_model d_ff"],
    W_ups: Float[Array, "layers d_model d_ff"],
    W_downs: Float[Array, "layers d_ff d_model"],
    W_gamma_qkvs: Float[Array, "layers 1 d_model"],
    W_gamma_mlps: Float[Array, "layers 1 d_model"],
    RoPE_cos: Float[Array, "half batch seq"],
    RoPE_sin: Float[Array, "half batch seq"],
    *,
    eps: float = 1e-6,
    qkv_order: str = "group",
    output_kv: bool = False,
    axis: str | None = None,
    **hints: Any,
) -> Result:
    """Emits `Llama3Transformer`.

    Args:
        X: as in `llama3_transformer`, and so are all but the last.
        W_qkvs: as in `llama3_transformer`; here all weights and gains are stacked.
        W_outs: as in `llama3_transformer`.
        W_gates: as in `llama3_transformer`.
        W_ups: as in `llama3_transformer`.
        W_downs: as in `llama3_transformer`.
        W_gamma_qkvs: as in `llama3_transformer`.
        W_gamma_mlps: as in `llama3_transformer`.
        RoPE_cos: as in `llama3_transformer`.
        RoPE_sin: as in `llama3_transformer`.
        eps: as in `llama3_transformer`.
        qkv_order: as in `llama3_transformer`.
        output_kv: as in `llama3_transformer`.
        axis: as in `llama3_transformer`.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        As `llama3_transformer`.
    """
    given: dict[str, Any] = locals()
    operands: Any = X, *(given[name] for name in AXES), RoPE_cos, RoPE_sin
    config = dict(eps=float(eps), order=qkv_order, output_kv=bool(output_kv), axis=axis)
    outs = llama3_transformer_family(*operands, name=NAME, **config, **hints)
    return outs if output_kv else outs[0]
