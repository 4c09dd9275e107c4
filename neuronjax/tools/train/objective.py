"""What a run minimises: the next-token loss, as the macro `LinearCrossEntropy`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from neuronjax.models.llama import Llama
from neuronjax.models.moe_lm import MoELM
from neuronjax.primitives.cross_entropy import linear_cross_entropy
from neuronjax.tools.train.blueprint import ROWS


def next_token_loss(
    model: Llama,
    mesh: Mesh | None,
    windows: Int[Array, "batch window"],
    weights: Float[Array, " batch"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    r"""The mean loss of a token, and the load-balance loss of the experts.

    $$\ell = -\frac{1}{BT} \sum_{b, t} \log p(w_{b, t+1} \mid w_{b, 1 \ldots t})$$

    Args:
        model: the decoder; its logits never exist all at once.
        mesh: of `Blueprint`; its `tensor` axis divides the vocabulary.
        windows: `[batch, seq + 1]` token ids.
        weights: `[batch]`, what each window counts; 1 unless named.

    Returns:
        Both in nats a token, float32; the second is 0 for a dense decoder.
    """
    tokens, targets = windows[:, :-1], windows[:, 1:]
    balance = jnp.zeros((), jnp.float32)
    if isinstance(model, MoELM):
        x, balance = model.hidden_with_balance(tokens)
    else:
        x = model.hidden(tokens)
    each = jnp.ones(windows.shape[0], jnp.float32) if weights is None else weights
    total = _total(mesh, x, model.output_table().T, targets, each)
    count = jnp.sum(each) * jnp.asarray(tokens.shape[1], jnp.float32)
    return total / count, balance


def _total(mesh: Mesh | None, x, w, targets, weights) -> Array:
    """The sum over all tokens, each weighed as its window is."""
    if mesh is None:
        return _summed(x, w, targets, weights, axis=None)
    axis = "tensor" if mesh.shape["tensor"] > 1 else None

    def local(*operands: Array) -> Array:
        return lax.psum(_summed(*operands, axis=axis), ROWS)

    split = P(ROWS), P(None, axis), P(ROWS), P(ROWS)
    return jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=P())(
        x, w, targets, weights
    )


def _summed(x, w, targets, weights, *, axis: str | None) -> Array:
    sum_of = functools.partial(linear_cross_entropy, reduction="sum", axis=axis)
    each = jnp.broadcast_to(weights[:, None], targets.shape)
    return sum_of(x, w, targets, weights=each).astype(jnp.float32)
