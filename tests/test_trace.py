"""`neuronjax.trace`."""

import io

import jax
import jax.numpy as jnp
from jax import lax
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


def test_the_table_prints():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(neuronjax.trace(neuronjax.RoPE, X, TABLE, TABLE))
    assert "RoPE" in console.export_text()
