"""The macros `CrossEntropyFwd` and `CrossEntropyBwd`.

Outputs carry the checkpoint names `cross_entropy_fwd_loss` and
`cross_entropy_fwd_lse`. Differentiation also keeps `cross_entropy_fwd_base`, what was
subtracted of the logits, and where the others are rounded `cross_entropy_fwd_wide_lse`:
the backward reads these.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.cross_entropy import logits as kernel
from neuronjax.kernels.cross_entropy import plain
from neuronjax.kernels.dtypes import accumulator
from neuronjax.primitives import contracts
from neuronjax.primitives.cross_entropy import rules  # noqa: F401  enters the rows
from neuronjax.primitives.cross_entropy.facts import facts
from neuronjax.primitives.cross_entropy.names import BACKWARD, FORWARD
from neuronjax.primitives.known import in_int32
from neuronjax.primitives.macro import Example, MacroFamily


@contracts.contracted(facts)
def cross_entropy_fwd_kernel(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    keep: Bool[Array, "*tokens"] | None = None,
    *,
    dtype: DTypeLike | None = None,
    chunk_size: int | None = None,
    smoothing: float = 0.0,
    part_of: int | None = None,
    **hints: Any,
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """Emits `CrossEntropyFwd`.

    Args:
        logits: `[*tokens, V]`.
        targets: `[*tokens]`, any integers.
        keep: `[*tokens]`, True = keep; the loss and lse of any other token are 0 and
            its logits, NaN too, reach nothing.
        dtype: of the results; unless named float32, or float64 for float64.
        chunk_size: columns that are reduced at a time; unless named, as is fastest.
        smoothing: what the uniform distribution weighs in the label.
        part_of: the classes of the whole vocabulary, where the logits are a part of it.
            Targets count from the first column here; one in another part adds nothing.
        **hints: placement hints, `positions_per_batch` among them; they travel in the
            config bag and change no value.

    Returns:
        `(loss, lse)`, each `[*tokens]`. With `part_of` the loss stands without its lse.
    """
    wide = accumulator(logits.dtype)
    config = dict(
        out_dtype=None if dtype in (None, wide) else jnp.dtype(dtype).name,
        chunk=None if chunk_size is None else int(chunk_size),
        smoothing=float(smoothing),
        part_of=None if part_of is None else int(part_of),
        **hints,
    )
    labels = places(targets, part_of or logits.shape[-1])
    return cross_entropy_fwd(logits, labels, keep, name=FORWARD, **config)


@contracts.contracted(facts)
def cross_entropy_bwd_kernel(
    logits: Float[Array, "*tokens vocab"],
    targets: Int[Array, "*tokens"],
    lse: Float[Array, "*tokens"],
    keep: Bool[Array, "*tokens"] | None = None,
    d_loss: Float[Array, "*tokens"] | None = None,
    d_lse: Float[Array, "*tokens"] | None = None,
    *,
    reduction: str = "sum",
    dtype: DTypeLike | None = None,
    inplace: bool = False,
    chunk_size: int | None = None,
    smoothing: float = 0.0,
    part_of: int | None = None,
    **hints: Any,
) -> Float[Array, "*tokens vocab"]:
    """Emits `CrossEntropyBwd`.

    Args:
        logits: `[*tokens, V]`.
        targets: `[*tokens]`, any integers.
        lse: `[*tokens]`, as the forward gave it.
        keep: as in `cross_entropy_fwd_kernel`; the gradient of any other token is 0.
        d_loss: `[*tokens]`, the cotangent of the loss; 1 unless named.
        d_lse: `[*tokens]`, the cotangent of the lse; 0 unless named.
        reduction: `"mean"` divides `d_loss` by the number of tokens, `"sum"` does not.
        dtype: what the gradient is rounded to; unless named that of the logits.
        inplace: store the result in the dtype of the logits, whose buffer it then takes
            where they are donated: `jax.jit(..., donate_argnums=0)`.
        chunk_size: a hint here: the gradient is one pass, whatever the chunk.
        smoothing: as in `cross_entropy_fwd_kernel`.
        part_of: likewise.
        **hints: likewise.

    Returns:
        The gradient of the logits, `[*tokens, V]`.
    """
    rounded = jnp.dtype(logits.dtype if dtype is None else dtype)
    config = dict(
        reduction=reduction,
        out_dtype=rounded.name,
        stored_dtype=jnp.dtype(logits.dtype).name if inplace else rounded.name,
        chunk=None if chunk_size is None else int(chunk_size),
        smoothing=float(smoothing),
        part_of=None if part_of is None else int(part_of),
        **hints,
    )
    labels = places(targets, part_of or logits.shape[-1])
    operands = logits, labels, keep, lse, d_loss, d_lse, None
    return cross_entropy_bwd(*operands, name=BACKWARD, **config)[0]


def places(targets: Any, vocab: int) -> Array:
    """Targets in int32; one that is no class stays outside `[0, vocab)`."""
    return in_int32(targets, -max(vocab, 1), 2 * vocab)


def _emit_backward(operands, outs, cotangents, *, name, out_dtype, **config):
    logits, targets, keep = operands
    *_, wide, base = outs  # the base is a constant: its cotangent is nothing
    live = cotangents[:-1]
    given = [None if c is None else c.astype(wide.dtype) for c in live]
    d_loss = jnp.zeros_like(wide) if given[0] is None else given[0]
    rest = [c for c in given[1:] if c is not None]
    d_lse = sum(rest[1:], rest[0]) if rest else None
    dtype = jnp.dtype(logits.dtype).name
    config |= dict(reduction="sum", out_dtype=dtype, stored_dtype=dtype)
    config.pop("residual", None)
    grads = cross_entropy_bwd(
        logits, targets, keep, wide, d_loss, d_lse, base, name=BACKWARD, **config
    )
    return (*grads, None, None)


def _differentiated(config: dict[str, Any]) -> dict[str, Any]:
    """The same call, with what the backward's softmax is made of among its outputs."""
    return config | dict(residual=True)


def _outputs(
    *, out_dtype: str | None, residual: bool = False, **config: Any
) -> tuple[str, ...]:
    more = ("wide_lse", "base") if out_dtype else ("base",)
    return ("loss", "lse", *more) if residual else ("loss", "lse")


def _example(name: str, dtype: Any, batch: int) -> Example:
    """Seven columns in chunks of three; one token does not count."""
    key = jax.random.key(7)
    logits = jax.random.normal(key, (batch, 2, 7), dtype)
    targets = jnp.broadcast_to(jnp.array([3, 6], jnp.int32), (batch, 2))
    keep = jnp.arange(2 * batch).reshape(batch, 2) != 1
    config: dict[str, Any] = dict(smoothing=0.1, chunk=3)
    if name == FORWARD:
        operands = logits, targets, keep
        return Example(operands, config | dict(out_dtype=None), (0,) * 3, (0, 0))
    lse = jnp.log(jnp.sum(jnp.exp(logits), -1)) + 0.1
    operands = logits, targets, keep, lse, jnp.cos(lse), jnp.sin(lse), None
    dtypes = dict.fromkeys(("out_dtype", "stored_dtype"), jnp.dtype(dtype).name)
    config |= dict(reduction="sum", **dtypes)
    return Example(operands, config, (0,) * 6, (0,))


cross_entropy_bwd = MacroFamily(
    "cross_entropy_bwd",
    (BACKWARD,),
    kernel.cross_entropy_bwd,
    plain=plain.cross_entropy_plain_bwd,
    outputs=("dlogits",),
    static=kernel.cross_entropy_static_bwd,
    tangent_leaf=kernel.cross_entropy_static_bwd,
    example=_example,
)
cross_entropy_fwd = MacroFamily(
    "cross_entropy_fwd",
    (FORWARD,),
    kernel.cross_entropy_fwd,
    plain=plain.cross_entropy_plain,
    outputs=_outputs,
    backward=_emit_backward,
    static=kernel.cross_entropy_static_fwd,
    tangent_leaf=kernel.cross_entropy_static_fwd,
    differentiated=_differentiated,
    example=_example,
)
