"""What a call of prefill attention holds beside q, k and v: settings and operands."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax


class Options(NamedTuple):
    """The settings that decide values.

    Attributes:
        is_causal: row `i` sees keys up to its own position.
        scale: multiplies the product of a query and a key.
        window: how many keys a row sees, that of its own position included; 0 for all.
        stride: positions from one row to the next.
        soft_cap: `c` of `c * tanh(score / c)`; 0 for none.
        dropout_rate: how likely a weight is dropped.
        dropout_impl: the random number generator of the dropout key.
        softmax_dtype: what the weights are rounded to.
        mm_out_dtype: what the product of queries and keys is rounded to.
    """

    is_causal: bool
    scale: float = 1.0
    window: int = 0
    stride: int = 1
    soft_cap: float = 0.0
    dropout_rate: float = 0.0
    dropout_impl: str = "threefry2x32"
    softmax_dtype: str = "float32"
    mm_out_dtype: str = "float32"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Options":
        """Those of a config bag, which also holds layouts and hints."""
        return cls(**{key: config[key] for key in cls._fields if key in config})


class Extras(NamedTuple):
    """The operands that may be absent.

    `kv` stands for all columns: the slots of the prior, then the keys.

    Attributes:
        mask: boolean, `[1 or heads, 1 or q_seq, 1 or kv]`, True = keep.
        bias: the same shapes, added to the scores; a key of bias -inf is not seen.
        sink: `[heads, 1]`: one more score of each row, without a key.
        k_prior: keys in front of `k`, laid out like it.
        v_prior: their values.
        used: how many slots of the prior are filled, an int32 scalar.
        bound_min: int32 `[q_seq]`: the first key that a row sees.
        bound_max: int32 `[q_seq]`: one past the last.
        offset: the position of row 0, an int32 scalar.
        key: the data of a dropout key a head, uint32 `[heads, words]`.
    """

    mask: jax.Array | None = None
    bias: jax.Array | None = None
    sink: jax.Array | None = None
    k_prior: jax.Array | None = None
    v_prior: jax.Array | None = None
    used: jax.Array | None = None
    bound_min: jax.Array | None = None
    bound_max: jax.Array | None = None
    offset: jax.Array | None = None
    key: jax.Array | None = None

    def positions(self, rows: jax.Array, options: Options) -> jax.Array:
        """The positions of rows, counted from the first key."""
        rows = rows * options.stride
        return rows if self.offset is None else rows + self.offset
