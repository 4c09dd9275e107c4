"""Expert parallelism: tokens and experts are split over one mesh axis.

Each device routes its tokens and sends a token once to every device that has one of its
experts. There the local experts' weighted results are summed, and the sum goes back.

The exchange is padded: XLA on a CPU has no ragged one, and shapes must not depend on
values. From each device to each other `C` rows go, unless named the number of tokens of
a device: then none is ever dropped.

What crosses the wire. Forward: two all-to-alls. The first carries hidden states,
affinities and expert numbers as one array of bits, the second the sums. Backward: their
transposes, with a third for the affinities' gradients where hidden states are narrower
than those; and all-reduces of the gradients of what every device holds whole, the
router's weights. No tokens are gathered.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from neuronjax.kernels.dtypes import accumulator
from neuronjax.kernels.own_derivative import own_derivative
from neuronjax.kernels.shard_common import uniform
from neuronjax.primitives.blockwise_mm.functions import moe_cte
from neuronjax.primitives.blockwise_mm.spec import SkipMode
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.router_topk import router_topk
from neuronjax.primitives.routing import (
    block_size_for,
    mask_affinities,
    most_blocks,
    route_to_blocks,
)
from neuronjax.sharding.mesh import laid, require_axes

_NAME = "expert_parallel_moe"
# The arguments of `moe_cte` that are the same on every device.
_OPTIONS = {
    "activation_function",
    "checkpoint",
    "compute_dtype",
    "expert_affinities_scaling_mode",
    "gate_clamp_lower_limit",
    "gate_clamp_upper_limit",
    "up_clamp_lower_limit",
    "up_clamp_upper_limit",
}
_SIGNED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}
_BITS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def expert_parallel_moe(
    mesh: Mesh,
    x: Float[Array, "tokens d_model"],
    router_weight: Float[Array, "d_model num_experts"],
    gate_up_proj_weight: Float[Array, "num_experts d_model 2 d_ff"],
    down_proj_weight: Float[Array, "num_experts d_ff d_model"],
    *,
    k: int,
    axis: str = "expert",
    batch: str | None = None,
    router_bias: Float[Array, "... num_experts"] | None = None,
    selection_bias: Float[Array, " num_experts"] | None = None,
    token_mask: Bool[Array, " tokens"] | None = None,
    gate_and_up_proj_bias: Float[Array, "num_experts 2 d_ff"] | None = None,
    down_proj_bias: Float[Array, "num_experts d_model"] | None = None,
    act_fn: Any = "SOFTMAX",
    router_pre_norm: bool = True,
    norm_topk_prob: bool = True,
    block_size: int | None = None,
    capacity: int | None = None,
    **options: Any,
) -> tuple[
    Float[Array, "tokens d_model"],
    Float[Array, "tokens num_experts"],
    Int[Array, "tokens k"],
]:
    r"""A router and its experts, with tokens and experts split over `mesh`.

    $$\mathrm{out}_t = \sum_{e \in \mathrm{top}_k(t)} a_{te} \,
      \mathrm{expert}_e(x_t)$$

    Args:
        mesh: the devices.
        x: `[T, H]`, any floating dtype.
        router_weight: `[H, E]`, in the dtype of `x`, whole on every device.
        gate_up_proj_weight: `[E, H, 2, I]`, as `moe_cte` takes it.
        down_proj_weight: `[E, I, H]`.
        k: experts of a token.
        axis: the mesh axis that splits `T` and `E`.
        batch: a mesh axis that splits `T` too, each part with all experts.
        router_bias: as `w_bias` in `router_topk`.
        selection_bias: as in `router_topk`.
        token_mask: `[T]`, True = keep; the result for padding tokens is 0.
        gate_and_up_proj_bias: `[E, 2, I]`.
        down_proj_bias: `[E, H]`.
        act_fn: as in `router_topk`.
        router_pre_norm: likewise.
        norm_topk_prob: likewise.
        block_size: slots of a block of `moe_cte`; unless named it follows the load.
        capacity: `C`, how many rows go from each device to each other. Unless named,
            the `T / n` tokens of a device. If fewer, a device drops for each other the
            tokens after its first `C`: these lack the experts there.
        **options: further arguments of `moe_cte`, by name: its activation, its clamps,
            `expert_affinities_scaling_mode`, `compute_dtype` and `checkpoint`. A device
            stores for the worst routing; with `checkpoint="recompute"` nothing.

    Returns:
        `(out [T, H], router_logits [T, E], expert_index [T, k])`, split as `x` is. The
        last two are what `load_balance_loss` takes. `out` has the dtype of `x`; each
        device's sum is rounded to it for the way back.

    Raises:
        ValueError: the mesh lacks an axis, an operand has another shape, `T` or `E` is
            no positive multiple of the devices that split it, `k`, `capacity` or
            `block_size` is no positive integer, or an option is none of these.

    Source:
        Lepikhin et al. 2020, GShard, https://arxiv.org/abs/2006.16668, section 3.2.

    Example:
        >>> import jax.numpy as jnp
        >>> from neuronjax.sharding.mesh import make_mesh
        >>> x, router = jnp.ones((2, 4)), jnp.eye(4)
        >>> gate_up, down = jnp.ones((4, 4, 2, 3)), jnp.ones((4, 3, 4))
        >>> run = lambda x: expert_parallel_moe(
        ...     make_mesh(expert=1), x, router, gate_up, down, k=2)
        >>> out, logits, index = jax.jit(run)(x)
        >>> out.shape, index.tolist()
        ((2, 4), [[0, 1], [0, 1]])
    """
    require_axes(_NAME, mesh, axis=axis, batch=batch)
    along = (axis,) if batch is None else (batch, axis)
    by_token = dict(x=x, token_mask=token_mask)
    whole = dict(w=router_weight, w_bias=router_bias, selection_bias=selection_bias)
    by_expert = dict(
        gate_up_proj_weight=gate_up_proj_weight,
        down_proj_weight=down_proj_weight,
        gate_and_up_proj_bias=gate_and_up_proj_bias,
        down_proj_bias=down_proj_bias,
    )
    tokens, num_experts = _sizes(by_token, whole, by_expert)
    share = _share(tokens, num_experts, mesh, along)
    _require_options(options, k, num_experts, capacity=capacity, block_size=block_size)
    size = int(block_size or block_size_for(tokens, k, num_experts))
    rows = min(int(capacity or share), share)
    rule = dict(act_fn=act_fn, k=k, router_pre_norm=router_pre_norm)
    rule |= dict(norm_topk_prob=norm_topk_prob, x_hbm_layout=1)

    def local(by_token, whole, by_expert):
        x, mask = by_token["x"], by_token["token_mask"]
        logits, index, _, affinity = router_topk(
            x, **whole, **rule, token_mask=mask, return_eager_affi=True
        )
        plan = _Plan(index, mesh.shape[axis], num_experts, rows)
        held = plan.dispatch(x, affinity, axis)
        y = _experts(*held, by_expert, size, options)
        return plan.combine(y, axis), logits, index

    specs = P(along), P(), P(axis)
    arrays = by_token, whole, by_expert
    arrays = [laid(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return split(*arrays)


def _sizes(
    by_token: dict[str, Any], whole: dict[str, Any], by_expert: dict[str, Any]
) -> tuple[int, int]:
    """`T` and `E`; refuses shapes here, where they are whole."""
    x, router = by_token["x"], whole["w"]
    if np.ndim(x) != 2:
        raise ValueError(f"{_NAME}: x must have shape [T, H], got {np.shape(x)}")
    (tokens, width), count = x.shape, np.shape(router)[-1:]
    d_ff = np.shape(by_expert["gate_up_proj_weight"])[-1:]
    expected = dict(
        router_weight=(router, "[H, E]", (width, *count)),
        token_mask=(by_token["token_mask"], "[T]", (tokens,)),
    )
    shapes = dict(
        gate_up_proj_weight=("[E, H, 2, I]", (*count, width, 2, *d_ff)),
        down_proj_weight=("[E, I, H]", (*count, *d_ff, width)),
        gate_and_up_proj_bias=("[E, 2, I]", (*count, 2, *d_ff)),
        down_proj_bias=("[E, H]", (*count, width)),
    )
    expected |= {name: (by_expert[name], *shape) for name, shape in shapes.items()}
    for name, (array, axes, shape) in expected.items():
        if array is not None and np.shape(array) != shape:
            raise ValueError(
                f"{_NAME}: {name} must have shape {axes} = {shape}, got "
                f"{np.shape(array)}"
            )
    return tokens, *count


def _share(tokens: int, num_experts: int, mesh: Mesh, along: tuple[str, ...]) -> int:
    """The tokens of a device; refuses what does not divide."""
    if len(along) > len(set(along)):
        raise ValueError(f"{_NAME}: batch must be another axis than {along[0]!r}")
    devices, axis = math.prod(mesh.shape[name] for name in along), along[-1]
    if tokens < 1 or tokens % devices:
        raise ValueError(
            f"{_NAME}: T must be a positive multiple of the {devices} devices that "
            f"split it, got {tokens}"
        )
    if num_experts % mesh.shape[axis]:
        raise ValueError(
            f"{_NAME}: E must be a multiple of the {mesh.shape[axis]} devices of "
            f"{axis!r}, got {num_experts}"
        )
    return tokens // devices


def _require_options(
    options: dict[str, Any], k: Any, num_experts: int, **sizes: int | None
) -> None:
    if not is_count(k) or k > num_experts:
        raise ValueError(
            f"{_NAME}: k must be an integer from 1 to E = {num_experts}, got {k!r}"
        )
    for name, size in sizes.items():
        if size is not None and not is_count(size):
            raise ValueError(
                f"{_NAME}: {name} must be a positive integer, got {size!r}"
            )
    other = sorted(options.keys() - _OPTIONS)
    if other:
        raise ValueError(
            f"{_NAME}: options must be among {', '.join(sorted(_OPTIONS))}, "
            f"got {', '.join(other)}"
        )


class _Plan:
    """Which tokens of a device go to which other.

    Args:
        index: `[T, k]`, the experts of the device's tokens; `E` for none.
        devices: how many share the experts.
        num_experts: `E`.
        rows: how many rows go to each device.
    """

    def __init__(self, index: Array, devices: int, num_experts: int, rows: int):
        self.devices, self.rows, self.tokens = devices, rows, index.shape[0]
        self.experts = num_experts // devices
        owner = index // self.experts  # `devices` for no expert
        # One slot a token, however many of its experts are there.
        self.token = route_to_blocks(owner, devices, capacity=rows).token_position_to_id
        self.index = index

    def dispatch(
        self, x: Array, affinity: Array, axis: str
    ) -> tuple[Array, Array, Array]:
        """What the device gets: hidden states, affinities, its experts' numbers."""
        there = jnp.arange(self.devices, dtype=jnp.int32)[:, None, None]
        none = self.experts * self.devices
        index = self._gather(self.index, none)
        is_there = index // self.experts == there
        number = jnp.where(is_there, index % self.experts, self.experts)
        weight = jnp.where(is_there, self._gather(affinity, 0), 0)
        sent = self._gather(x, 0), weight
        held = _swap(_packed(*sent, number), axis)
        hidden, weight = _received(*sent, held, axis=axis)
        return (
            lax.collapse(hidden, 0, 2),
            lax.collapse(weight, 0, 2),
            lax.collapse(_numbers(held, index.shape[-1], x.dtype), 0, 2),
        )

    def combine(self, y: Array, axis: str) -> Array:
        """The sum over the devices of what each returns for a token."""
        back = _swap(y.reshape(self.devices, self.rows, -1), axis)
        back = lax.collapse(back, 0, 2).astype(accumulator(y.dtype))
        (out, _) = uniform(jnp.zeros((self.tokens, y.shape[1]), back.dtype), back)
        return out.at[self.token].add(back, mode="drop").astype(y.dtype)

    def _gather(self, rows: Array, empty: int) -> Array:
        """`[devices, rows, ...]`: the rows that go out; `empty` in empty slots."""
        found = rows.at[self.token].get(mode="fill", fill_value=empty)
        return found.reshape(self.devices, self.rows, *rows.shape[1:])


def _swap(x: Array, axis: str) -> Array:
    """Row `d` goes to device `d`; row `d` of the result came from it."""
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


def _packed(x: Array, affinity: Array, number: Array) -> Array:
    """One array of bits, in words as wide as a hidden state."""
    width = x.dtype.itemsize
    parts = (x, affinity, number.astype(_SIGNED[width]))
    return jnp.concatenate([_words(p, width) for p in parts], axis=-1)


def _words(x: Array, width: int) -> Array:
    bits = lax.bitcast_convert_type(x, _BITS[width])
    return bits if bits.ndim == x.ndim else lax.collapse(bits, x.ndim - 1)


def _floats(words: Array, dtype: Any) -> Array:
    """The inverse of `_words`."""
    parts = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    if parts > 1:
        words = words.reshape(*words.shape[:-1], -1, parts)
    return lax.bitcast_convert_type(words, dtype)


def _numbers(held: Array, k: int, dtype: Any) -> Array:
    signed = _SIGNED[jnp.dtype(dtype).itemsize]
    return lax.bitcast_convert_type(held[..., -k:], signed).astype(jnp.int32)


def _exchanged(primals, tangents, *, axis: str):
    dx, d_affinity, _ = tangents
    if dx.dtype != d_affinity.dtype:
        return _swap(dx, axis), _swap(d_affinity, axis)
    moved = _swap(jnp.concatenate([dx, d_affinity], axis=-1), axis)
    return tuple(jnp.split(moved, [dx.shape[-1]], axis=-1))


@own_derivative(_exchanged)
def _received(x: Array, affinity: Array, held: Array, *, axis: str):
    """Hidden states and affinities out of the bits that came for those sent.

    Bits have no derivative. That of an exchange is the same exchange of the tangents.
    """
    width, k = x.shape[-1], affinity.shape[-1]
    end = held.shape[-1] - k
    weight = _floats(held[..., width:end], affinity.dtype)
    return _floats(held[..., :width], x.dtype), weight


def _experts(
    hidden: Array,
    affinity: Array,
    number: Array,
    weights: dict[str, Any],
    size: int,
    options: dict[str, Any],
) -> Array:
    """The weighted sum of a device's experts for every row that came to it."""
    count, (rows, k) = weights["gate_up_proj_weight"].shape[0], number.shape
    most = most_blocks(rows, min(k, count), count, size)
    ids, experts, _ = route_to_blocks(
        number, count, size, num_blocks=most, skip_token=True
    )
    every = jnp.arange(count, dtype=jnp.int32)
    dense = jnp.where(number[..., None] == every, affinity[..., None], 0).sum(1)
    return moe_cte(
        hidden,
        mask_affinities(dense, number, skip_token=True),
        token_position_to_id=ids,
        block_to_expert=experts,
        block_size=size,
        spec="shard_on_block",
        skip_dma=SkipMode(skip_token=True),
        **weights,
        **options,
    )
