"""The decode block over ranks: two all-gathers, and the results of one device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import neuronjax
from neuronjax.sharding import sharded_attention_block_tkg
from tests.attention_block_case import call, operands, sizes
from tests.attention_block_loss import split, weighed
from tests.hlo import collectives
from tests.macro_case import error

OPTIONS = dict(rmsnorm_X_enabled=True, rmsnorm_QK_pre_rope_enabled=True)
CACHED = ("K_cache", "V_cache", "kv_cache_update_idx", "active_blocks_table")


def mesh_of(count):
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("tensor",), (AxisType.Auto,), devices=devices)


def arrays_for(count, **more):
    return operands(sizes(batch=2 * count, heads=2 * count, **more), OPTIONS)


def over(mesh, arrays, options=OPTIONS):
    return sharded_attention_block_tkg(mesh, arrays["X"], **rest_of(arrays), **options)


def rest_of(arrays):
    return {k: x for k, x in arrays.items() if k != "X"}


def summed(mesh, arrays, options=OPTIONS):
    """The ranks' parts of the sum over heads, added."""
    x_out, *stored = over(mesh, arrays, options)
    return x_out.sum(0), *stored


def placed(mesh, arrays):
    """Every array where its rank reads it: no other exchange is needed."""
    specs = dict.fromkeys(CACHED, P("tensor")) | dict(attention_mask=P(None, "tensor"))
    specs["W_out"] = P("tensor")
    found = {
        k: jax.device_put(x, NamedSharding(mesh, specs.get(k, P())))
        for k, x in arrays.items()
    }
    width = arrays["V_cache"].shape[-1]
    for key in ("W_qkv", "bias_qkv"):
        columns = NamedSharding(mesh, P(None, "tensor"))
        queries = jax.device_put(arrays[key][:, : -2 * width], columns)
        found[key] = queries, found[key][:, -2 * width :]
    return found


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_ranks_compute_what_one_device_does(count):
    """Outputs and gradients of every operand, on 2, 3, 5 and 8 devices."""
    mesh, arrays = mesh_of(count), arrays_for(count)
    live, rest = split(arrays)

    def both(run):
        def loss(live):
            outs = run(live | rest)
            return weighed(outs), outs

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (_, wanted), exact = both(lambda a: call(a, OPTIONS))(live)
    (_, got), grads = both(lambda a: summed(mesh, a))(live)
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) <= 1e-5
    for key in live:
        assert error(grads[key], exact[key]) <= 5e-5, key


def test_two_all_gathers_cross_the_wire():
    mesh, arrays = mesh_of(4), arrays_for(4)
    arrays = placed(mesh, arrays)
    assert collectives(lambda a: over(mesh, a), arrays) == {"all-gather": 2}
    skipped = OPTIONS | dict(skip_attention=True)
    assert collectives(lambda a: over(mesh, a, skipped), arrays) == {}


def test_the_backward_gathers_again_and_sends_back():
    mesh, arrays = mesh_of(4), arrays_for(4)
    live, rest = split(arrays)
    given = placed(mesh, arrays)
    grads = jax.grad(lambda live: weighed(over(mesh, live | rest)))
    found = collectives(grads, {key: given[key] for key in live})
    assert found.pop("all-reduce") >= 1
    # Two forward, and two again where XLA does not see that they are the same.
    assert 2 <= found.pop("all-gather") <= 4
    assert found == {"all-to-all": 2}


OTHER = {
    "no update": (dict(update_cache=False), {}, ()),
    "keys transposed": (dict(K_cache_transposed=True, head_axis=True), {}, ()),
    "row": (dict(quantization_type_qkv="ROW", quantization_type_out="ROW"), {}, ()),
    "static": (
        dict(quantization_type_qkv="STATIC", quantization_type_out="STATIC"),
        {},
        (),
    ),
    "transposed": (dict(transposed_out=True), dict(hidden=128), ()),
}


@pytest.mark.parametrize("name", OTHER)
def test_options_over_ranks(name):
    options, more, without = OTHER[name]
    n = sizes(batch=4, heads=4, **more)
    arrays = operands(n, options, without=without)
    mesh = mesh_of(2)
    given = {k: x for k, x in options.items() if k != "head_axis"}
    got = jax.jit(lambda a: summed(mesh, a, given))(arrays)
    for a, b in zip(got, call(arrays, options), strict=True):
        assert error(a, b) <= 1e-5


def test_heads_without_a_projection_are_each_rank_s_own():
    arrays = operands(sizes(batch=4, heads=4), {}, without=("W_out",))
    x_out, *_ = jax.jit(lambda a: over(mesh_of(2), a, {}))(arrays)
    wanted = call(arrays, {})[0]
    assert error(jnp.concatenate([*x_out], 1), wanted) <= 1e-5


def test_blocks_are_counted_within_a_rank():
    n = sizes(batch=2, heads=2, slots=6, visible=8, block=4)
    arrays = operands(n, {})
    table = jnp.array([[2, 0], [1, 2]], jnp.uint32)
    index = jnp.array([[3], [9]], jnp.uint32)
    local = dict(arrays, active_blocks_table=table, kv_cache_update_idx=index)
    # On one device the second rank's three blocks lie behind the first one's.
    shift = jnp.array([[0], [3]], jnp.uint32)
    whole = dict(local, active_blocks_table=table + shift)
    whole["kv_cache_update_idx"] = index + 4 * shift
    got = jax.jit(lambda a: summed(mesh_of(2), a, {}))(local)
    for a, b in zip(got, call(whole, {}), strict=True):
        assert error(a, b) <= 1e-5


def test_ranks_may_hold_their_own_sinks():
    """`[N, 1]` on each rank: one more all-gather, of one number a head."""
    count, arrays = 2, operands(sizes(batch=4, heads=4), {}, without=("W_out",))
    mesh = mesh_of(count)
    width = 4 * arrays["V_cache"].shape[-1]

    def local(a, own):
        for key in ("W_qkv", "bias_qkv"):
            a[key] = jnp.concatenate([own[key], a[key][:, width:]], 1)
        more = {k: own[k] for k in (*CACHED[:3], "attention_mask", "sink")}
        group = dict(KVDP=count, KVDP_replica_group="tensor")
        return neuronjax.attention_block_tkg(**a | more, **group)[0]

    own = {k: arrays[k] for k in (*CACHED[:3], "attention_mask", "sink")}
    own |= {k: arrays[k][:, :width] for k in ("W_qkv", "bias_qkv")}
    specs = dict.fromkeys((*CACHED[:3], "sink"), P("tensor"))
    specs |= dict.fromkeys(("attention_mask", "W_qkv", "bias_qkv"), P(None, "tensor"))
    rest = {
        k: x for k, x in arrays.items() if k not in own or k in ("W_qkv", "bias_qkv")
    }
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), specs), out_specs=P(None, "tensor")
    )
    assert error(jax.jit(run)(rest, own), call(arrays, {})[0]) <= 1e-5

    def loss(sink):
        return weighed([run(rest, own | dict(sink=sink))])

    def exact(sink):
        return weighed([call(arrays | dict(sink=sink), {})[0]])

    got, wanted = (jax.jit(jax.grad(f))(arrays["sink"]) for f in (loss, exact))
    assert error(got, wanted) <= 1e-5


def test_ranks_may_be_mapped_instead_of_devices():
    """`jax.vmap` with an axis name, forward and every gradient."""
    count = 2
    arrays = operands(sizes(batch=4, heads=4), {}, without=("W_out", "sink"))
    width = 4 * arrays["V_cache"].shape[-1]
    group = dict(KVDP=count, KVDP_replica_group="ranks")

    def columns(x):
        queries = jnp.split(x[:, :width], count, 1)
        return jnp.stack([jnp.concatenate([q, x[:, width:]], 1) for q in queries])

    def parts(a):
        own = {k: a[k].reshape(count, -1, *a[k].shape[1:]) for k in CACHED[:3]}
        own["attention_mask"] = jnp.stack(jnp.split(a["attention_mask"], count, 1))
        return own | {k: columns(a[k]) for k in ("W_qkv", "bias_qkv")}

    def mapped(a):
        own = parts(a)
        rest = {k: x for k, x in a.items() if k not in own}
        run = jax.vmap(
            lambda own: neuronjax.attention_block_tkg(**rest, **own, **group)[0],
            axis_name="ranks",
        )
        return [jnp.concatenate([*run(own)], 1)]

    def whole(a):
        return [call(a, {})[0]]

    assert neuronjax.trace(mapped, arrays).count("AttentionBlockTkg") == 1
    assert error(mapped(arrays)[0], whole(arrays)[0]) <= 1e-5
    live, rest = split(arrays)
    got, wanted = (
        jax.jit(jax.grad(lambda live, f=f: weighed(f(live | rest))))(live)
        for f in (mapped, whole)
    )
    for key in live:
        assert error(got[key], wanted[key]) <= 2e-5, key


def test_both_routes_and_the_plain_form_compute_the_same():
    mesh, arrays = mesh_of(2), arrays_for(2)
    wanted = call(arrays, OPTIONS)
    for context in (neuronjax.lowering("composite"), neuronjax.plain()):
        with context:
            outs = jax.jit(lambda a: summed(mesh, a))(arrays)
        for a, b in zip(outs, wanted, strict=True):
            assert error(a, b) <= 1e-5


def test_what_cannot_be_divided_is_refused():
    arrays = operands(sizes(batch=3, heads=3), {})
    with pytest.raises(ValueError, match="multiples of the 2 ranks, got 3 and 3"):
        over(mesh_of(2), arrays, {})
    with pytest.raises(ValueError, match="ranks must be an axis of the mesh"):
        over(mesh_of(2), arrays, dict(ranks="data"))
    with pytest.raises(ValueError, match="W_qkv must be given"):
        sharded_attention_block_tkg(mesh_of(2), arrays["X"])
