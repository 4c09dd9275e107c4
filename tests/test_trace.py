"""`neuronjax.trace`."""

import io

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import neuronjax

X = jax.ShapeDtypeStruct((64, 1, 2, 8), jnp.float32)
TABLE = jax.ShapeDtypeStruct((32, 1, 8), jnp.float32)


def test_a_macro_in_a_scan_counts_times_its_length():
    def five(x, table):
        turn = lambda x, _: (neuronjax.RoPE(x, table, table), None)  # noqa: E731
        return lax.scan(turn, x, None, length=5)[0].sum()

    assert neuronjax.trace(five, X, TABLE).count("RoPE") == 5
    assert neuronjax.trace(jax.grad(five), X, TABLE).count("RoPEBwd") == 5


def test_a_row_says_what_was_emitted():
    (row,) = neuronjax.trace(neuronjax.RoPE, X, TABLE, TABLE).rows
    assert (row.name, row.leaf, row.tiled, row.count) == ("RoPE", "RoPE", False, 1)
    assert row.shapes == ("f32[64,1,2,8]", "f32[32,1,8]", "f32[32,1,8]")
    assert dict(row.config)["interleaved"] is False
    assert row.bytes == 4 * (2 * 64 * 2 * 8 + 2 * 32 * 8)


def test_a_mapped_macro_is_one_row():
    mapped = jax.vmap(neuronjax.RoPE, (0, None, None))
    x = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    (row,) = neuronjax.trace(mapped, x, TABLE, TABLE).rows
    assert (row.count, row.vmapped) == (1, 1)


def test_a_ring_is_traced_inside_one_shard_map_and_inside_two():
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), kinds, devices=jax.devices()[:4])

    def ring(x, axis, size):
        return neuronjax.fine_grained_allgather(x, size, axis=axis)

    def inner(x):
        return ring(x, "tensor", 2) + ring(x, "data", 2)

    def outer(x):
        spec = P(None, "tensor")
        return jax.shard_map(
            inner, out_specs=spec, in_specs=spec, axis_names={"tensor"}
        )(x)

    x = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    two = jax.shard_map(
        outer, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    one = jax.shard_map(
        inner, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P("data", "tensor")
    )
    for call in one, two:
        trace = neuronjax.trace(call, x)
        assert trace.count("FineGrainedAllGather") == 2
        assert {row.shapes for row in trace.rows} == {("f32[2,3]{V:(data,tensor)}",)}


def test_the_table_prints():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(neuronjax.trace(neuronjax.RoPE, X, TABLE, TABLE))
    assert "RoPE" in console.export_text()


def test_no_name_is_folded_in_a_narrow_terminal():
    q = jnp.ones((2, 8, 4))
    traced = neuronjax.trace(lambda q: neuronjax.attention_cte(q, q, q, tp_k=True), q)
    name = "CausalAttentionMMSoftmaxMMWithoutSwap"
    for width in (80, 160):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(traced)
        text = console.export_text()
        assert name in text and "tp_q=True" in text and "f32[2,4,8]" in text
    assert name in str(traced) and "MFLOP" in str(traced)
