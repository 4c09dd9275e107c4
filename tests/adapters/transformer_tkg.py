"""Cases of `transformer_tkg`: one array a layer and argument, by its number."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from tests.adapters import adapter, take

# The case's name of a layer's array, and the argument that lists them.
_LISTS = dict(
    W_qkv="W_qkvs",
    W_out="W_outs",
    W_gate="W_gates",
    W_up="W_ups",
    W_down="W_downs",
    W_gamma_qkv="W_gamma_qkvs",
    W_gamma_mlp="W_gamma_mlps",
    K_cache="K_caches",
    V_cache="V_caches",
    W_gate_scale="W_gate_scales",
    W_up_scale="W_up_scales",
    W_down_scale="W_down_scales",
)


def _arguments(inputs, options):
    """The lists and the arrays that all layers share."""
    layers = range(options["num_layers"])
    given = {k: x for k, x in inputs.items() if not re.fullmatch(r"\w+_\d+", k)}
    for name, argument in _LISTS.items():
        own = [inputs.get(f"{name}_{i}") for i in layers]
        if any(x is not None for x in own):
            given[argument] = own
    for i in layers:
        if given.get("W_gate_scales", [None] * len(layers))[i] is not None:
            for name in ("W_gates", "W_ups", "W_downs"):
                given[name][i] = given[name][i].astype(jnp.float8_e4m3)
    given.setdefault("mask_active", None)
    given.setdefault("position_ids", None)
    settings = dict(eps="eps", clamp_bound="clamp_bound")
    settings |= dict(sbuf_residual_and_cc="sbuf_residual_and_cc")
    return given | take(options, num_layers="num_layers", **settings)


@adapter("transformer_tkg")
def transformer_tkg(inputs, options):
    """Every rank of a replica group holds the same weights."""
    given, size = _arguments(inputs, options), options.get("replica_group_size", 1)
    arrays = {k: x for k, x in given.items() if jax.tree.leaves(x) and k in _SPREAD}
    rest = {k: x for k, x in given.items() if k not in arrays}
    more = dict(replica_groups=[[*range(size)]], axis="tensor") if size > 1 else {}

    def local(arrays):
        return neuronjax.transformer_tkg(**arrays, **rest, **more)

    if size > 1:
        local = _on_ranks(local, size)
    output, k_caches, v_caches = jax.jit(local)(arrays)
    found = dict(output=output)
    for i, (k, v) in enumerate(zip(k_caches, v_caches, strict=True)):
        found |= {f"K_cache_{i}": k, f"V_cache_{i}": v}
    return found


def _on_ranks(local, size):
    """`local` on `size` ranks, which are mapped where there are fewer devices."""
    if size > jax.device_count():
        ranks = jax.vmap(local, None, axis_size=size, axis_name="tensor")
        return lambda arrays: jax.tree.map(lambda x: x[0], ranks(arrays))
    devices = jax.devices()[:size]
    mesh = jax.make_mesh((size,), ("tensor",), (AxisType.Auto,), devices=devices)
    return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())


_SPREAD = {*_LISTS.values(), "X", "RoPE_cos", "RoPE_sin"}
_SPREAD |= {"mask_cache", "mask_active", "position_ids"}
