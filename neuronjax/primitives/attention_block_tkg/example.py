"""Small operands of both NAMEs of the decode block, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.attention_block_tkg.operands import Operands
from neuronjax.kernels.attention_block_tkg.plain import attention_block_plain
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives.macro import Example

NAME, BACKWARD = "AttentionBlockTkg", "AttentionBlockTkgBwd"
_ABSENT = dict.fromkeys(Operands._fields)
_CONFIG: dict[str, Any] = dict(
    x_eps=1e-6,
    hidden_actual=None,
    pre_eps=1e-6,
    post_eps=None,
    interleaved=False,
    softmax_scale=0.5,
    k_transposed=False,
    update_cache=True,
    skip_attention=False,
    quantization="NONE",
    is_fp8_kernel=False,
    quantization_out="NONE",
    transposed_out=False,
    cores=None,
    out_in_sb=False,
    round_activations=True,
    kvdp=1,
    axis=None,
    lnc_axis=None,
)
# The axis of each operand that a batch splits; the rest every device holds whole.
_SPLIT = dict(x=0, cos=1, sin=1, k_cache=0, v_cache=0, mask=1, position=0)


def example(name: str, dtype: Any, batch: int) -> Example:
    """One head of 4, two new tokens, five slots of which four are visible."""
    o = _operands(dtype, batch)
    present = [key for key, x in o._asdict().items() if x is not None]
    split = tuple(_SPLIT.get(key) for key in present)
    outs_split = (0,) * 9
    if name == NAME:
        return Example(tuple(o), _CONFIG, split, outs_split)
    # Of rows as short as these some are nearly zero: with a small `eps` the third
    # derivatives of their norms would be mostly rounding.
    config = _CONFIG | dict(x_eps=0.1, pre_eps=0.1)
    outs = attention_block_plain(*o, name=NAME, **config)
    cotangents = [jnp.cos(out + 1) for out in outs]
    live = tuple(key for key in present if is_differentiable(getattr(o, key).dtype))
    return Example(
        (*o, *outs, *cotangents),
        config | dict(live=live),
        split + outs_split * 2,
        tuple(_SPLIT.get(key) for key in live),
    )


def _operands(dtype: Any, batch: int) -> Operands:
    shapes: dict[str, tuple[int, ...]] = dict(
        x=(batch, 2, 6),
        x_gain=(1, 6),
        w_qkv=(6, 12),
        q_pre_gain=(1, 4),
        cos=(2, batch, 2),
        sin=(2, batch, 2),
        k_cache=(batch, 5, 4),
        v_cache=(batch, 5, 4),
        sink=(1, 1),
        w_out=(4, 6),
        bias_out=(1, 6),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    given: dict[str, Any] = {
        key: jax.random.normal(random, shape, dtype)
        for random, (key, shape) in zip(keys, shapes.items(), strict=True)
    }
    slot = jnp.arange(4, dtype=jnp.int32)[:, None, None, None]
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    query = jnp.arange(2, dtype=jnp.int32)
    given["mask"] = jnp.where(slot < 2, slot <= row, slot - 2 <= query)
    # A write at slot 3 fits, one at 4 does not.
    given["position"] = 3 + jnp.arange(batch, dtype=jnp.int32)[:, None] % 2
    return Operands(**(_ABSENT | given))
