"""The public function of the router."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from neuronjax.kernels.hidden_layout import LAYOUTS, from_partitions
from neuronjax.primitives import contracts
from neuronjax.primitives.options import RouterActFnType
from neuronjax.primitives.router_topk.macro import router_topk_kernel
from neuronjax.primitives.router_topk.rules import public_facts


@contracts.contracted(public_facts)
def router_topk(
    x: Float[Array, "..."],
    w: Float[Array, "d_model num_experts"],
    w_bias: Float[Array, "... num_experts"] | None = None,
    *,
    act_fn: RouterActFnType | str,
    k: int,
    x_hbm_layout: int,
    x_sb_layout: int = 0,
    router_pre_norm: bool = True,
    norm_topk_prob: bool = False,
    use_column_tiling: bool = False,
    use_indirect_dma_scatter: bool = False,
    return_eager_affi: bool = False,
    use_PE_broadcast_w_bias: bool = False,
    shard_on_tokens: bool = False,
    skip_store_expert_index: bool = False,
    skip_store_router_logits: bool = False,
    selection_bias: Float[Array, " num_experts"] | None = None,
    token_mask: Bool[Array, " tokens"] | None = None,
    logits_dtype: DTypeLike | None = None,
    affinities_dtype: DTypeLike | None = None,
) -> tuple[Array, ...]:
    r"""Routes each token to its `k` best experts.

    $$L = x W + b, \qquad \mathrm{idx}_t = \text{the } k \text{ largest of } L_t$$

    The affinities, with `a` the activation:

    - `router_pre_norm=False`: `a` over the `k` selected logits only;
    - `router_pre_norm=True`: `a(L)` of ALL experts, dense: no entry is masked;
    - with `norm_topk_prob` besides: the selected `a(L)`, divided by their sum.

    Unless dense, an expert that is not selected has affinity 0. Experts are listed by
    descending logit, the lowest index first among equals, under any transformation.
    Gradients flow through logits and affinities; the selection is a constant.

    Infinities are limits: an expert at -inf has affinity 0 and is chosen last; experts
    at +inf share a softmax; a token of -inf alone has softmax affinities 0. A NaN logit
    ranks first and makes the softmax or normalized affinities of its token NaN; no
    other token's.

    Args:
        x: `[H, T]` with `x_hbm_layout=0`, `[T, H]` with 1; or, as it lies on chip,
            `[128, T, H/128]`, and then `x_sb_layout` says how.
        w: `[H, E]`, in the dtype of `x`: bfloat16, float16, float32 or float64.
        w_bias: `[1, E]` or `[E]`, added to the logits.
        act_fn: `SOFTMAX` or `SIGMOID`.
        k: how many experts a token gets, at most `E`.
        x_hbm_layout: 0 or 1; not read for an `x` of three axes.
        x_sb_layout: where channel `h` of a three-axis `x` lies, with `C = H/128`: 0 for
            `h = p*C + c`; 1 for halves of two cores, `h = half*H/2 + p*C/2 + c mod C/2`
            with `half = c // (C/2)`; 2 for `h = c*128 + p`.
        router_pre_norm: activate the logits of all experts, not those of the selected
            ones alone; it does not change the selection.
        norm_topk_prob: make the selected affinities sum to 1; needs `router_pre_norm`.
        use_column_tiling: how the chip tiles; changes no value.
        use_indirect_dma_scatter: how the chip scatters; changes no value.
        return_eager_affi: return the affinities at `expert_index` too, `[T, k]`.
        use_PE_broadcast_w_bias: how the chip adds the bias; changes no value.
        shard_on_tokens: splits `T` over two cores; changes no value.
        skip_store_expert_index: leave `expert_index` out of the results.
        skip_store_router_logits: leave `router_logits` out of the results.
        selection_bias: `[E]`, added to the activated scores (of all experts) for the
            selection only, as for balance without a loss: affinities do not hold it and
            it gets no gradient.
        token_mask: `[T]`, True = keep. A padding token has logits and affinities 0,
            expert index `E` (no expert; JAX drops scatters there) and no gradient.
        logits_dtype: of `router_logits`; unless named float32, or float64 for float64.
        affinities_dtype: of `expert_affinities`; unless named the same.

    Returns:
        `(router_logits [T, E], expert_index [T, k], expert_affinities [T, E])`, and
        with `return_eager_affi` the selected affinities `[T, k]`, always at least
        float32. Indices are int32. Arithmetic is float32, or float64 for float64.
        Checkpoint names: `router_topk_logits`, `_index`, `_affinities`, `_topk`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them. The chip's
            limits (`H` a multiple of 128, `E` 512, `k` 8, and those of its paths) are
            reported by `neuronjax.can` and do not hold here.

    Source:
        aws-neuron/nki-library, `core/router_topk/router_topk.py`; Fedus et al. 2021,
        Switch Transformers, https://arxiv.org/abs/2101.03961, equation 1.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.log(jnp.array([[1.0, 2.0, 3.0, 4.0]]))
        >>> _, index, affinities = router_topk(
        ...     logits,
        ...     jnp.eye(4),
        ...     act_fn="SOFTMAX",
        ...     k=2,
        ...     x_hbm_layout=1,
        ...     router_pre_norm=False,
        ... )
        >>> index.tolist(), affinities.round(3).tolist()
        ([[3, 2]], [[0.0, 0.0, 0.429..., 0.571...]])
    """
    form = "HT" if x_hbm_layout == 0 else "TH"
    if x.ndim == 3:
        x, form = from_partitions(x, LAYOUTS[x_sb_layout]), "TH"
    logits, index, affinities, eager = router_topk_kernel(
        x,
        w,
        w_bias,
        selection_bias,
        token_mask,
        act_fn=act_fn,
        k=k,
        form=form,
        pre_norm=router_pre_norm,
        norm_topk=norm_topk_prob,
        use_column_tiling=bool(use_column_tiling),
        use_indirect_dma_scatter=bool(use_indirect_dma_scatter),
        use_PE_broadcast_w_bias=bool(use_PE_broadcast_w_bias),
        shard_on_tokens=bool(shard_on_tokens),
    )
    outs = [] if skip_store_router_logits else [_cast(logits, logits_dtype)]
    outs += [] if skip_store_expert_index else [index]
    outs += [_cast(affinities, affinities_dtype)]
    return tuple([*outs, eager] if return_eager_affi else outs)


def _cast(x: Array, dtype: DTypeLike | None) -> Array:
    return x if dtype is None else x.astype(jnp.dtype(dtype))
