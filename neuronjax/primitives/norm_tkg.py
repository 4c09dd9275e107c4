"""Norms of a decode step, laid on 128 partitions: `[128, tokens, H/128]`."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neuronjax.kernels.hidden_layout import PARTITIONS, from_partitions, to_partitions
from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.reduce import (
    is_radicand,
    neuron_reduce_macro_kernel,
    traced,
)
from neuronjax.primitives.tile import MemrefTile

_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32", "float64")))
_NAMES = ("rmsnorm_tkg", "layernorm_tkg")


def _facts(call: SimpleNamespace) -> dict[str, Any]:
    shape = tuple(getattr(call.input, "shape", ()))
    on_chip = call.input_in_sbuf
    width = shape[-1] * (PARTITIONS if on_chip else 1) if len(shape) == 3 else 0
    beta = getattr(call, "beta", None)
    given = dict(gamma=call.gamma) | ({} if beta is None else dict(beta=beta))
    unlike = [
        f"{key} must have shape (1, H) = (1, {width}), got {np.shape(x)}"
        for key, x in given.items()
        if np.shape(x) != (1, width)
    ]
    operands = dict(given, input=call.input)
    misfit = [
        f"{key} of dtype {getattr(x, 'dtype', None)}"
        for key, x in operands.items()
        if not hasattr(x, "dtype") or x.dtype not in _DTYPES
    ]
    return dict(
        shape=shape,
        layout=_layout(call),
        H=width,
        traced=traced(dict(eps=call.eps)),
        tile=any(isinstance(x, MemrefTile) for x in operands.values()),
        unlike="; ".join(unlike),
        misfit=", ".join(misfit),
        ranked=len(shape) == 3 and (not on_chip or shape[0] == PARTITIONS),
        strided=getattr(call, "hidden_dim_tp", False),
        single=getattr(call, "single_core_forced", False),
        actual=getattr(call, "hidden_actual", None),
    )


def _layout(call: SimpleNamespace) -> str:
    if getattr(call, "hidden_dim_tp", False):
        return "strided"
    if getattr(call, "single_core_forced", False):
        return "contiguous"
    return "halves" if call.shard_on_h or call.lnc == 2 else "contiguous"


def _normalized(call: SimpleNamespace, beta: Array | None, **settings: Any) -> Array:
    layout = _layout(call)
    if call.input_in_sbuf:
        rows = from_partitions(call.input, layout)
    else:
        rows = call.input.reshape(-1, call.input.shape[-1])
    offset = None if beta is None else beta[0]
    out = neuron_reduce_macro_kernel(rows, call.gamma[0], offset, **settings)
    return to_partitions(out, layout)


@contracts.contracted(_facts)
def rmsnorm_tkg(
    input: Float[Array, "_ _ _"],
    gamma: Float[Array, "1 d_model"],
    *,
    eps: float = 1e-6,
    hidden_actual: int | None = None,
    hidden_dim_tp: bool = False,
    single_core_forced: bool = False,
    shard_on_h: bool = False,
    lnc: int | None = None,
    input_in_sbuf: bool = False,
) -> Float[Array, "128 tokens _"]:
    r"""RMSNorm of `T = B*S` tokens, laid on 128 partitions.

    $$y = \frac{x}{\sqrt{\sum x^2 / H_n + \epsilon}} \cdot \gamma$$

    Channel `h` of token `t` lies at `out[p, t, c]`, `C = H/128`: `h = p*C + c` on one
    core; with `hidden_dim_tp` `h = c*128 + p`; on two cores `h = half*H/2 + p*C/2 +
    c mod C/2`, `half = c // (C/2)`.

    Args:
        input: `[B, S, H]`, any floating dtype of 16 bits or more; or, with
            `input_in_sbuf`, `[128, T, H/128]` in the layout of the result.
        gamma: the gain, `[1, H]`.
        eps: added to the mean square, finite and not negative; in the units of
            `input**2`.
        hidden_actual: `H_n`, the columns that count in the mean where the rest is zero
            padding; `H` unless named.
        hidden_dim_tp: the strided layout, whatever `lnc` is.
        single_core_forced: the layout of one core, whatever `lnc` is.
        shard_on_h: each of two cores normalises half of the channels: the layout of
            two cores.
        lnc: cores of a logical core, 1 or 2; 2 with `shard_on_h`, else 1 unless named.
        input_in_sbuf: whether `input` lies on chip already.

    Returns:
        `[128, T, H/128]` in the dtype of `input`. Statistics are float32, or float64
        for float64; a token whose squares exceed their range becomes zeros, as in
        `rms_norm`. It emits `NeuronReduceMacro`: checkpoint names `reduce_out`,
        `reduce_rstd`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.

    Source:
        aws-neuron/nki-library, `core/subkernels/rmsnorm_tkg.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> rmsnorm_tkg(jnp.ones((1, 2, 256)), jnp.ones((1, 256))).shape
        (128, 2, 2)
    """
    call = SimpleNamespace(**locals())
    return _normalized(call, None, norm="rms", eps=eps, hidden_actual=hidden_actual)


@contracts.contracted(_facts)
def layernorm_tkg(
    input: Float[Array, "_ _ _"],
    gamma: Float[Array, "1 d_model"],
    beta: Float[Array, "1 d_model"] | None = None,
    *,
    eps: float = 1e-6,
    shard_on_h: bool = False,
    lnc: int | None = None,
    input_in_sbuf: bool = False,
) -> Float[Array, "128 tokens _"]:
    r"""LayerNorm of `T = B*S` tokens, laid on 128 partitions.

    $$y = \frac{x - \operatorname{mean}(x)}
      {\sqrt{\operatorname{var}(x) + \epsilon}} \cdot \gamma + \beta$$

    with the population variance. The layouts of one and of two cores are those of
    `rmsnorm_tkg`.

    Args:
        input: `[B, S, H]`, or with `input_in_sbuf` `[128, T, H/128]`.
        gamma: the gain, `[1, H]`.
        beta: the offset, `[1, H]`.
        eps: added to the variance, finite and not negative; in the units of
            `input**2`.
        shard_on_h: as in `rmsnorm_tkg`.
        lnc: as in `rmsnorm_tkg`.
        input_in_sbuf: as in `rmsnorm_tkg`.

    Returns:
        `[128, T, H/128]` in the dtype of `input`; the range is that of `layer_norm`.
        It emits `NeuronReduceMacro`:
        checkpoint names `reduce_out`, `reduce_mean`, `reduce_rstd`.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.

    Source:
        aws-neuron/nki-library, `core/subkernels/layernorm_tkg.py`.

    Example:
        >>> import jax.numpy as jnp
        >>> layernorm_tkg(jnp.ones((1, 2, 256)), jnp.ones((1, 256)), lnc=2).shape
        (128, 2, 2)
    """
    return _normalized(SimpleNamespace(**locals()), beta, norm="layer", eps=eps)


def _arguments(**changes: Any):
    x, gamma = np.zeros((1, 2, 256), np.float32), np.zeros((1, 256), np.float32)
    return lambda function: dict(dict(input=x, gamma=gamma), **changes)


def _of_width(width: int, **changes: Any):
    arrays = dict(input=np.zeros((1, 2, width), np.float32))
    return _arguments(**arrays, gamma=np.zeros((1, width), np.float32), **changes)


contracts.add(
    *only_flags("rmsnorm_tkg", "layernorm_tkg"),
    Contract(
        "norm_tkg.tensors",
        _NAMES,
        "{function}: input, gamma and beta must be tensors: it takes no tiles",
        lambda c: c.tile,
        example=lambda function: _arguments(
            input=MemrefTile.from_tensor(jnp.zeros((1, 2, 256)), 2)
        )(function),
    ),
    Contract(
        "norm_tkg.static",
        _NAMES,
        "{function}: eps must be a Python number, known while tracing, got {traced}",
        lambda c: c.traced,
        example=_arguments(eps=np.zeros(2, np.float32)),
    ),
    Contract(
        "norm_tkg.eps",
        _NAMES,
        "{function}: eps must be finite and not negative, got {eps}",
        lambda c: not is_radicand(c.eps),
        example=_arguments(eps=float("nan")),
        stage=2,
    ),
    Contract(
        "norm_tkg.rank",
        _NAMES,
        "{function}: input must have shape [B, S, H], or with input_in_sbuf "
        "[128, T, H/128], with H at least 1, got {shape}",
        lambda c: not c.ranked or c.shape[-1] == 0,
        example=_arguments(input=np.zeros((2, 256), np.float32)),
    ),
    Contract(
        "norm_tkg.dtype",
        _NAMES,
        "{function}: operands must be bfloat16, float16, float32 or float64, got "
        "{misfit}",
        lambda c: c.misfit,
        example=_arguments(input=np.zeros((1, 2, 256), np.int32)),
    ),
    Contract(
        "norm_tkg.cores",
        _NAMES,
        "{function}: lnc must be 1 or 2, and 2 with shard_on_h, got {lnc}",
        lambda c: c.lnc not in (None, 1, 2) or (c.shard_on_h and c.lnc == 1),
        example=_arguments(lnc=3),
    ),
    Contract(
        "norm_tkg.shard",
        ("rmsnorm_tkg",),
        "{function}: shard_on_h goes with neither hidden_dim_tp nor single_core_forced",
        lambda c: c.shard_on_h and (c.strided or c.single),
        example=_arguments(shard_on_h=True, hidden_dim_tp=True),
    ),
    Contract(
        "norm_tkg.hidden_actual",
        ("rmsnorm_tkg",),
        "{function}: hidden_actual must be an integer between 1 and H = {H}, got "
        "{actual}",
        lambda c: (
            c.actual is not None
            and not (isinstance(c.actual, int) and 1 <= c.actual <= c.H)
        ),
        example=_arguments(hidden_actual=257),
        stage=2,
    ),
    Contract(
        "norm_tkg.vectors",
        _NAMES,
        "{function}: {unlike}",
        lambda c: c.unlike,
        example=_arguments(gamma=np.zeros(256, np.float32)),
        stage=2,
    ),
    Contract(
        "norm_tkg.partitions",
        _NAMES,
        "{function}: H must be a multiple of 128, got {value}",
        size=Size("H", lambda c: c.H, multiple=PARTITIONS),
        example=_of_width(160),
        stage=2,
    ),
    Contract(
        "norm_tkg.halves",
        _NAMES,
        "{function}: two cores need H in multiples of 256, got {H}",
        lambda c: c.layout == "halves" and c.H % (2 * PARTITIONS) != 0,
        example=_of_width(128, shard_on_h=True),
        stage=2,
    ),
)
