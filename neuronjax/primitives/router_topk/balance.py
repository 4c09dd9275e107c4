"""How evenly a router loads its experts: counts, and a loss that evens them out."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.router_topk import softmax
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract
from neuronjax.primitives.options import RouterActFnType, member, members


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    logits: Any = getattr(call, "router_logits", None)
    shape = np.shape(call.expert_index)
    return dict(
        shape=shape,
        tokens=shape[0] if shape else 0,
        integer=jnp.issubdtype(jnp.asarray(call.expert_index).dtype, jnp.integer),
        logits_shape=np.shape(logits),
        fits=logits is None
        or (np.ndim(logits) == 2 and np.shape(logits)[:1] == shape[:1]),
        mask_shape=np.shape(call.token_mask),
        mask_dtype=getattr(call.token_mask, "dtype", None),
    )


@contracts.contracted(_facts)
def expert_counts(
    expert_index: Int[Array, "tokens k"],
    num_experts: int,
    token_mask: Bool[Array, " tokens"] | None = None,
) -> Int[Array, " num_experts"]:
    """How many tokens each expert gets.

    Args:
        expert_index: `[T, k]`, what each token is routed to; an index outside
            `[0, num_experts)` names no expert and is not counted.
        num_experts: `E`.
        token_mask: `[T]`, True = keep; padding tokens are not counted.

    Returns:
        `[E]` int32.

    Raises:
        ValueError: `expert_index` is not a matrix of integers, `token_mask` is not
            `[T]` of bool, or `num_experts` is no positive integer.

    Example:
        >>> import jax.numpy as jnp
        >>> expert_counts(jnp.array([[0, 2], [2, 1], [2, 0]]), 4).tolist()
        [2, 1, 3, 0]
    """
    return _counts(expert_index, num_experts, token_mask)


def _counts(expert_index: Array, num_experts: int, token_mask: Array | None) -> Array:
    named = expert_index[..., None] == jnp.arange(num_experts, dtype=expert_index.dtype)
    if token_mask is not None:
        named = named & token_mask[:, None, None]
    return jnp.sum(named, axis=(0, 1), dtype=jnp.int32)


@contracts.contracted(_facts)
def load_balance_loss(
    router_logits: Float[Array, "tokens num_experts"],
    expert_index: Int[Array, "tokens k"],
    *,
    act_fn: RouterActFnType | str = "SOFTMAX",
    token_mask: Bool[Array, " tokens"] | None = None,
) -> Float[Array, ""]:
    r"""The auxiliary loss that is least when every expert gets as many tokens.

    $$\ell = E \sum_e f_e P_e, \qquad f_e = \frac{\mathrm{count}_e}{T k}, \qquad
      P_e = \frac{1}{T} \sum_t p_{te}$$

    `p` is the softmax of a token's logits, or its sigmoids divided by their sum. An
    even load gives 1, a single expert that takes all `E`. Gradients flow through `P`.

    Args:
        router_logits: `[T, E]`, as `router_topk` returns them.
        expert_index: `[T, k]`, likewise.
        act_fn: `SOFTMAX` or `SIGMOID`.
        token_mask: `[T]`, True = keep. The loss is that of the kept tokens alone; 0 if
            there are none.

    Returns:
        A scalar, float32 or float64.

    Raises:
        ValueError: shapes or dtypes do not fit, or `act_fn` is unknown.

    Source:
        Fedus et al. 2021, Switch Transformers, https://arxiv.org/abs/2101.03961,
        equations 4 to 6, with `k` experts a token.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.zeros((2, 4))
        >>> float(load_balance_loss(logits, jnp.array([[0, 1], [2, 3]])))
        1.0
    """
    num_experts, k = router_logits.shape[1], expert_index.shape[1]
    acc = accumulator(router_logits.dtype)
    keep = jnp.ones(router_logits.shape[0], bool) if token_mask is None else token_mask
    logits = jnp.where(keep[:, None], router_logits.astype(acc), 0)
    if member(RouterActFnType, act_fn) is RouterActFnType.SIGMOID:
        logits = jax.nn.log_sigmoid(logits)  # s / sum(s) = softmax(log s)
    p = softmax(logits)
    tokens = jnp.maximum(jnp.sum(keep, dtype=jnp.int32), jnp.int32(1)).astype(acc)
    mean = jnp.sum(jnp.where(keep[:, None], p, 0), axis=0) / tokens
    load = _counts(expert_index, num_experts, keep).astype(acc) / (tokens * k)
    return num_experts * jnp.sum(load * mean)


_INDEX = np.zeros((3, 2), np.int32)


def _arguments(**changes: Any):
    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(expert_index=_INDEX)
        if function == "expert_counts":
            given["num_experts"] = 4
        else:
            given["router_logits"] = np.zeros((3, 4), np.float32)
        return given | changes

    return build


_BOTH = ("expert_counts", "load_balance_loss")
contracts.add(
    Contract(
        "router_balance.index",
        _BOTH,
        "{function}: expert_index must be integers of shape [T, k], got {shape}",
        lambda c: len(c.shape) != 2 or not c.integer,
        example=_arguments(expert_index=np.zeros(3, np.int32)),
    ),
    Contract(
        "router_balance.experts",
        ("expert_counts",),
        "{function}: num_experts must be a positive integer, got {num_experts}",
        lambda c: not isinstance(c.num_experts, int) or c.num_experts < 1,
        example=_arguments(num_experts=0),
    ),
    Contract(
        "router_balance.logits",
        ("load_balance_loss",),
        "{function}: router_logits must have shape [T, E] with T = {tokens}, got "
        "{logits_shape}",
        lambda c: not c.fits,
        example=_arguments(router_logits=np.zeros((2, 4), np.float32)),
    ),
    Contract(
        "router_balance.activation",
        ("load_balance_loss",),
        f"{{function}}: act_fn must be one of {members(RouterActFnType)}, "
        "got {act_fn}",
        lambda c: member(RouterActFnType, c.act_fn) is None,
        example=_arguments(act_fn="RELU"),
    ),
    Contract(
        "router_balance.mask",
        _BOTH,
        "{function}: token_mask must be bool of shape [T] = ({tokens},), got "
        "{mask_dtype} of shape {mask_shape}",
        lambda c: (
            c.token_mask is not None
            and (c.mask_shape != (c.tokens,) or c.mask_dtype != jnp.dtype(bool))
        ),
        example=_arguments(token_mask=np.ones(3, np.float32)),
    ),
)
