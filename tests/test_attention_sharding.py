"""Attention split over batch and heads equals attention on one device."""

import functools

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from neuronjax.sharding import make_mesh, sharded_attention
from tests.attention_mesh import DEVICES, agree, alone, costs, operands, split


@pytest.mark.parametrize("devices", DEVICES)
def test_heads_over_a_mesh_equal_one_device(devices):
    arrays, static = operands(1, 2 * devices, devices, 7, "sink of each sequence")
    run = functools.partial(sharded_attention, make_mesh(tensor=devices))
    agree(lambda a: split(run, a, static), lambda a: alone(a, static), arrays)


@pytest.mark.parametrize("devices", DEVICES)
def test_the_batch_over_a_mesh_equals_one_device(devices):
    arrays, static = operands(devices, 2, 1, 7, "sink of each sequence")
    mesh = make_mesh(data=devices)
    run = functools.partial(sharded_attention, mesh, batch="data", heads=None)
    agree(lambda a: split(run, a, static), lambda a: alone(a, static), arrays)


def test_packing_bounds_over_batch_and_heads_equal_one_device():
    arrays, static = operands(2, 4, 2, 7, "sink")
    starts = jnp.asarray([0, 0, 0, 3, 3, 3, 3], jnp.float32)[:, None]
    arrays |= dict(bound_min=starts, bound_max=jnp.where(starts > 0, 7.0, 3.0))
    run = functools.partial(
        sharded_attention, make_mesh(data=2, tensor=2), batch="data"
    )
    agree(lambda a: split(run, a, static), lambda a: alone(a, static), arrays)


LEAD = P("data", "tensor")
SPLIT = dict.fromkeys(("q", "k", "v", "k_prior", "v_prior"), LEAD) | dict(
    sink=P(None, "tensor"), bias=P("data", "tensor")
)


@pytest.mark.parametrize(
    ("option", "backward"),
    [
        ("window", {}),
        ("prefix", {}),
        ("bias", {}),
        # One logit for all sequences: their gradients are added over the batch.
        ("sink", {"all-reduce": 1}),
    ],
)
def test_over_batch_and_heads_only_shared_gradients_are_added(option, backward):
    mesh = make_mesh(data=2, tensor=2)
    run = functools.partial(sharded_attention, mesh, batch="data")
    assert costs(mesh, run, SPLIT, option) == ({}, backward)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda q, k, v: sharded_attention(
                make_mesh(tensor=2), q, k, v, sink=jnp.zeros((2, 1))
            ),
            r"sharded_attention: sink must have \[1 or batch, heads, 1\], "
            r"batch, heads = \(1, 2\), got \(2, 1\)",
        ),
        (
            lambda q, k, v: sharded_attention(
                make_mesh(tensor=2), q, k, v, bias=jnp.zeros((1, 2, 6, 5))
            ),
            r"bias must have 1 or the size in each of \[batch, heads, q_seq, kv_seq\] "
            r"= \(1, 2, 6, 6\), got \(1, 2, 6, 5\)",
        ),
    ],
)
def test_operands_that_a_mesh_cannot_split_are_refused(call, words):
    arrays, _ = operands(1, 2, 2, 6, "window")
    with pytest.raises(ValueError, match=words):
        call(*(arrays[n] for n in "qkv"))
