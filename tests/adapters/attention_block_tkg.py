"""Cases of `attention_block_tkg`, alone and with its caches divided over ranks."""

import inspect

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import neuronjax
from tests.adapters import adapter, take

# What belongs to a stage, and the flag that turns the stage on.
_STAGES = {
    "rmsnorm_X_enabled": ("rmsnorm_X_gamma",),
    "rmsnorm_QK_pre_rope_enabled": (
        "rmsnorm_QK_pre_rope_W_Q",
        "rmsnorm_QK_pre_rope_W_K",
    ),
    "rmsnorm_QK_post_rope_enabled": (
        "rmsnorm_QK_post_rope_W_Q",
        "rmsnorm_QK_post_rope_W_K",
    ),
}
_ARGUMENTS = set(inspect.signature(neuronjax.attention_block_tkg).parameters)


def _arguments(inputs, options):
    """The call of a case: the peer ignores what belongs to a stage that is off."""
    given = {k: v for k, v in (options | inputs).items() if k in _ARGUMENTS}
    for flag, names in _STAGES.items():
        if not options.get(flag):
            given = {k: v for k, v in given.items() if k not in names}
    # The reference clips keys and values, and rounds neither.
    given |= dict(round_activations=False, lnc=options.get("lnc_of_transposed_layout"))
    if "active_blocks_table" in inputs:
        given["attention_mask"] = _token_order(given["attention_mask"], options)
    return given


def _token_order(mask, options):
    """Masks of block caches come in the chip's order."""
    more = take(
        options,
        block_len="block_len",
        lnc="lnc",
        enable_fa_s_prior_tiling="enable_fa_s_prior_tiling",
    )
    return neuronjax.mask_to_token_order(mask, "BLOCK", **more)


def _outputs(outs, inputs, options):
    """By the reference's names and layouts."""
    x_out, k_out, v_out = outs
    if options.get("out_in_sb") and "W_out" not in inputs:
        batch, seq, _ = inputs["X"].shape
        x_out = x_out.reshape(x_out.shape[0], batch, -1, seq)
    if options.get("update_cache", True):
        return dict(X_out=x_out, K_cache_updated=k_out, V_cache_updated=v_out)
    return dict(X_out=x_out, K_tkg=k_out, V_tkg=v_out[:, 0])


@adapter("attention_block_tkg")
def attention_block_tkg(inputs, options):
    if options.get("KVDP") in (None, 1):
        options = {k: x for k, x in options.items() if k != "KVDP_replica_group"}
    given = _arguments(inputs, options)
    return _outputs(neuronjax.attention_block_tkg(**given), inputs, options)


@adapter("attention_block_tkg (KVDP)")
def attention_block_tkg_over_ranks(inputs, options):
    """`rank0_W_qkv` and the like are one rank's; the others are every rank's."""
    count = options["KVDP"]
    names = {name[6:] for name in inputs if name.startswith("rank0_")}
    own = {
        name: jnp.stack([inputs[f"rank{r}_{name}"] for r in range(count)])
        for name in names
    }
    whole = {k: x for k, x in inputs.items() if not k.startswith("rank")}
    grouped = options | dict(KVDP_replica_group="ranks")

    def local(whole, own):
        mine = whole | {name: x[0] for name, x in own.items()}
        outs = attention_block_tkg(mine, grouped)
        return {name: x[None] for name, x in outs.items()}

    mesh = jax.make_mesh(
        (count,), ("ranks",), (AxisType.Auto,), devices=jax.devices()[:count]
    )
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("ranks")), out_specs=P("ranks")
    )
    outs = jax.jit(run)(whole, own)
    return {f"rank{r}_{name}": x[r] for name, x in outs.items() for r in range(count)}
