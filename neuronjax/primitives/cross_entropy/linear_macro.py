"""The macros `LinearCrossEntropy` and `LinearCrossEntropyBwd`, NAMEs of this project.

Outputs carry the checkpoint names `linear_cross_entropy_loss` and
`linear_cross_entropy_lse`; those of a weighted sum `linear_cross_entropy_total`, and
where it is differentiated `linear_cross_entropy_each`, `_dx` and `_dw`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from neuronjax.kernels.cross_entropy import linear as kernel
from neuronjax.kernels.cross_entropy import plain
from neuronjax.primitives import contracts
from neuronjax.primitives.cross_entropy import rules  # noqa: F401  enters the rows
from neuronjax.primitives.cross_entropy.facts import facts
from neuronjax.primitives.cross_entropy.macro import places
from neuronjax.primitives.cross_entropy.names import LINEAR, LINEAR_BACKWARD
from neuronjax.primitives.macro import Example, MacroFamily

TOKENS = "LinearCrossEntropy (each token)"


@contracts.contracted(facts)
def linear_cross_entropy_kernel(
    x: Float[Array, "tokens d_model"],
    w: Float[Array, "d_model vocab"],
    targets: Int[Array, " tokens"],
    coefficients: Float[Array, " tokens"] | None = None,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    part_of: int | None = None,
    block_size: int | None = None,
    **hints: Any,
) -> Float[Array, ""] | tuple[Float[Array, " tokens"], Float[Array, " tokens"]]:
    """Emits `LinearCrossEntropy`.

    Args:
        x: `[N, H]`.
        w: `[H, V]`.
        targets: `[N]`, any integers.
        coefficients: `[N]`, what each token weighs in the sum.
        smoothing: as in `cross_entropy_fwd_kernel`.
        z_loss: what the square of a token's lse weighs beside its loss.
        part_of: as in `cross_entropy_fwd_kernel`; only without `coefficients`.
        block_size: tokens whose logits exist at a time; unless named 256, or as many as
            have 64 MB of them.
        **hints: placement hints; they travel in the config bag and change no value.

    Returns:
        The weighted sum, a scalar; without `coefficients` `(loss, lse)` of each token.
    """
    config: dict[str, Any] = dict(
        form="tokens" if coefficients is None else "total",
        smoothing=float(smoothing),
        z_loss=float(z_loss),
        part_of=None if part_of is None else int(part_of),
        rows=int(block_size or kernel.rows_for(w.shape[-1])),
        **hints,
    )
    labels = places(targets, part_of or w.shape[-1])
    operands = x, w, labels, coefficients
    outs = linear_cross_entropy(*operands, name=LINEAR, **config)
    return outs if coefficients is None else outs[0]


def _emit_backward(operands, outs, cotangents, *, name, form, **config):
    x, w, targets, coefficients = operands
    config = {k: v for k, v in config.items() if k != "gradient"}
    if form == "tokens":
        d_loss, d_lse = map(_filled, cotangents, outs)
        given = (x, w, targets, outs[1], d_loss, d_lse)
        grads = linear_cross_entropy_bwd(
            *given, name=LINEAR_BACKWARD, form=form, **config
        )
        return (*grads, None, None)
    total, *later = cotangents
    grads = [None, None, None]
    if total is not None:
        scaled = linear_cross_entropy_bwd(
            *outs[1:], total, name=LINEAR_BACKWARD, form=form, **config
        )
        each, *products = scaled
        grads = [*products, each]
    if any(c is not None for c in later):
        seeds = tuple(map(_filled, later, outs[1:]))
        more = _second(x, w, targets, coefficients, seeds, config)
        grads = [
            g if old is None else old.astype(g.dtype) + g
            for old, g in zip(grads, more, strict=True)
        ]
    dx, dw, d_coefficients = grads
    return dx, dw, None, d_coefficients


def _second(x, w, targets, coefficients, seeds, config) -> tuple:
    """The vjp of what is stored: the loss of each token, `dx`, `dw`."""
    z_loss = config["z_loss"]

    def each(x, w):
        operands = x, w, targets, None
        loss, lse = linear_cross_entropy(
            *operands, name=LINEAR, form="tokens", **config
        )
        return loss + z_loss * lse**2 if z_loss else loss

    def stored(x, w, coefficients):
        losses, pull = jax.vjp(each, x, w)
        grads = pull(coefficients.astype(losses.dtype))
        wide = (g.astype(s.dtype) for g, s in zip(grads, seeds[1:], strict=True))
        return (losses, *wide)

    return jax.vjp(stored, x, w, coefficients)[1](seeds)


def _filled(cotangent: Array | None, like: Array) -> Array:
    return jnp.zeros_like(like) if cotangent is None else cotangent.astype(like.dtype)


def _backward_leaf(*operands: Array, form: str, **config: Any) -> tuple:
    """The gradients from each token's cotangents, or the stored ones, scaled."""
    if form == "tokens":
        return kernel.linear_cross_entropy_bwd(*operands, **config)
    each, dx, dw, total = operands
    return total * each, total * dx, total * dw


def _backward_plain(*operands: Array, form: str, **config: Any) -> tuple:
    if form == "tokens":
        return plain.linear_cross_entropy_plain_bwd(*operands, **config)
    return tuple(operands[-1] * x for x in operands[:-1])


def _outputs(*, form: str, gradient: bool = False, **config: Any) -> tuple[str, ...]:
    if form == "tokens":
        return ("loss", "lse")
    return ("total", "each", "dx", "dw") if gradient else ("total",)


def _backward_outputs(*, form: str, **config: Any) -> tuple[str, ...]:
    return ("dx", "dw") if form == "tokens" else ("d_coefficients", "dx", "dw")


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    """A weighted sum brings its gradients: its logits are there only once."""
    return config | (dict(gradient=True) if config["form"] == "total" else {})


def _example(name: str, dtype: Any, batch: int) -> Example:
    """Blocks of at most four tokens; the tokens of a batch are two."""
    keys = jax.random.split(jax.random.key(8), 2)
    tokens = 2 * batch
    x = jax.random.normal(keys[0], (tokens, 3), dtype)
    w = jax.random.normal(keys[1], (3, 5), dtype)
    targets = jnp.arange(tokens, dtype=jnp.int32) % 5
    config: dict[str, Any] = dict(form="tokens", smoothing=0.1, part_of=None, rows=4)
    if name == TOKENS:
        operands = x, w, targets, None
        return Example(operands, config, (0, None, 0), (0, 0))
    each = jnp.cos(jnp.arange(tokens, dtype=dtype))
    if name == LINEAR:
        config |= dict(form="total", z_loss=0.01)
        operands = x, w, targets, each
        return Example(operands, config, (0, None, 0, 0), (None,))
    lse = jnp.log(jnp.sum(jnp.exp(x @ w), -1)) + jnp.asarray(0.1, dtype)
    operands = x, w, targets, lse, each, jnp.sin(each)
    return Example(operands, config, (0, None, 0, 0, 0, 0), (0, None))


linear_cross_entropy_bwd = MacroFamily(
    "linear_cross_entropy_bwd",
    (LINEAR_BACKWARD,),
    _backward_leaf,
    plain=_backward_plain,
    outputs=_backward_outputs,
    example=_example,
)
linear_cross_entropy = MacroFamily(
    "linear_cross_entropy",
    (LINEAR,),
    kernel.linear_cross_entropy_fwd,
    plain=plain.linear_cross_entropy_plain,
    outputs=_outputs,
    backward=_emit_backward,
    differentiated=_differentiated,
    example=_example,
    variants=(TOKENS,),
)
