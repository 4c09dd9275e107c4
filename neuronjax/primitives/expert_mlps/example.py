"""Small operands of a decode step's experts, for the transformation table."""

from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.expert_mlps.operands import TILE_AXES, Operands
from neuronjax.kernels.expert_mlps.tiles import retiled
from neuronjax.kernels.mx.formats import E2M1FN
from neuronjax.kernels.mx.layout import HIDDEN, INTERMEDIATE, pack_weight
from neuronjax.primitives.macro import Example

NAME = "ExpertMLPs"
TILED, BLOCK_SCALED = "ExpertMLPs (all, tiles)", "ExpertMLPs (MX)"
VARIANTS = (TILED, BLOCK_SCALED)
_ROWS = ("hidden", "affinities", "index")
_CONFIG: dict[str, Any] = dict(
    all_experts=False,
    scaling="POST_SCALE",
    mask=False,
    activation="SiLU",
    gate_clamp_upper_limit=1.0,
    gate_clamp_lower_limit=None,
    up_clamp_upper_limit=None,
    up_clamp_lower_limit=-1.0,
    block_size=None,
    out_dtype=None,
    quantization="NONE",
    is_fp8_kernel=False,
    is_tiled=False,
)


def example(name: str, dtype: Any, batch: int) -> Example:
    """A selective step in which a token names an expert twice, and one names none.

    On tiles all experts: the local two of four, those that are named.
    """
    if name == BLOCK_SCALED:
        return _block_scaled(dtype, batch)
    tiled, tokens = name == TILED, 2 * batch
    shapes: dict[str, Any] = dict(hidden=(tokens, 4), down_w=(2, 3, 4))
    shapes |= dict(gate_up_w=(2, 4, 2, 3))
    shapes |= dict(affinities=(tokens, 4 if tiled else 2), down_b=(2, 4))
    shapes |= {} if tiled else dict(gate_up_b=(2, 2, 3))
    made = _normal(shapes, dtype)
    made["index"] = _index(tokens)
    if tiled:
        made["index"] = made["index"] + 1
        made["rank"] = jnp.ones((1, 1), jnp.int32)
    config = dict(_CONFIG, all_experts=tiled, mask=tiled, is_tiled=tiled)
    if tiled:
        made = {key: retiled(x, TILE_AXES[key]) for key, x in made.items()}
    return _example(made, config, tiled)


def _normal(shapes: dict[str, tuple[int, ...]], dtype: Any) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(13), len(shapes)))
    return {k: jax.random.normal(next(keys), v, dtype) for k, v in shapes.items()}


def _index(tokens: int) -> jax.Array:
    """Of four tokens: both experts, one twice, one and none, both."""
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None] % 4
    rows = jnp.array([[0, 1], [1, 1], [0, 2], [1, 0]], jnp.int32)
    return rows[token[:, 0]]


def _example(made: dict[str, Any], config: dict[str, Any], tiled: bool) -> Example:
    present = [key for key in Operands._fields if key in made]
    # A tile of hidden states is `[p, c, T]`; the others lie on T.
    axes = dict(hidden=2 if tiled else 0, affinities=0, index=0)
    split = tuple(axes.get(key) for key in present)
    operands = tuple(made.get(key) for key in Operands._fields)
    return Example(operands, config, split, (axes["hidden"],))


def _block_scaled(dtype: Any, batch: int) -> Example:
    """Block-scaled weights; the width is the smallest that fills their tiles."""
    width, d_ff, tokens = 512, 16, batch
    made = _normal(dict(hidden=(tokens, width), affinities=(tokens, 2)), dtype)
    made["index"] = _index(tokens)
    keys = iter(jax.random.split(jax.random.key(17), 6))
    found: dict[str, list] = dict(
        gate_up_w=[], gate_up_scale=[], down_w=[], down_scale=[]
    )
    for _ in range(2):
        sides = [
            pack_weight(_weight(next(keys), width, d_ff), HIDDEN, E2M1FN)
            for _ in range(2)
        ]
        found["gate_up_w"].append(jnp.stack([codes for codes, _ in sides], 1))
        found["gate_up_scale"].append(jnp.stack([scale for _, scale in sides], 1))
        codes, scale = pack_weight(
            _weight(next(keys), d_ff, width), INTERMEDIATE, E2M1FN
        )
        found["down_w"].append(codes)
        found["down_scale"].append(scale)
    made |= {key: jnp.stack(parts) for key, parts in found.items()}
    config = dict(_CONFIG, quantization="MX", weight_format=E2M1FN.name)
    return _example(made, config, False)


def _weight(key: Any, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(key, (rows, columns)) / 16
