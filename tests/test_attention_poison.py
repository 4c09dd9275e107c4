"""NaN and infinity where a row does not look change neither values nor gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_case import CASES, STATISTICS, error

BAD = np.array([np.nan, np.inf, -np.inf], np.float32)
MIDDLE = dict(  # a column that some rows see and others do not
    long_window=150,
    window_past_a_block=20,
    long_prefix=280,
    packed=50,
    packed_causal=200,
    strided=270,
    slice=280,
    bias_of_rows=3,
    whole=230,
)


def _columns(case, floats):
    """Keys and values by column, `[kv_heads, columns, _]`, prefix first."""
    prior = case.prior is not None
    return [
        np.concatenate([floats[f"{n}_prior"], floats[n]], 1) if prior else floats[n]
        for n in "kv"
    ]


def _seen(case, floats):
    """`[heads, q_seq, columns]`, without what a bias of -inf hides."""
    seen = case.seen()
    return seen & (np.asarray(floats["bias"]) > -np.inf) if case.bias else seen


def _spoil(array, where):
    """The array with NaN, inf and -inf in turn where `where` holds."""
    where = np.broadcast_to(where, array.shape)
    bad = np.resize(BAD, array.shape).astype(array.dtype)
    return jnp.asarray(np.where(where, bad, np.asarray(array)))


def _spoil_columns(case, floats, where, which="kv"):
    """The operands with the columns `where [kv_heads, columns]` of keys or values."""
    floats = dict(floats)
    for name in which:
        for part, hidden in (
            (f"{name}_prior", where[:, : case.prior or 0]),
            (name, where[:, case.prior or 0 :]),
        ):
            if part in floats:
                floats[part] = _spoil(floats[part], hidden[..., None])
    return floats


def _by_key_head(case, array):
    return array.reshape(case.heads[1], -1, *array.shape[1:])


def _whole_bias(case, where):
    """Entries of the bias all of whose scores are in `where`."""
    alone = tuple(a for a, n in enumerate(case.broadcast(case.bias)) if n == 1)
    return where.all(alone, keepdims=True)


@pytest.mark.parametrize("name", CASES)
def test_what_no_row_sees_may_hold_anything(name):
    """R-08: keys, values, slots, biases, and queries and cotangents of empty rows."""
    case = CASES[name]
    floats, cotangents = case.floats(), case.cotangents()
    run, seen = case.program(), _seen(case, floats)
    hidden = ~_by_key_head(case, seen).any((1, 2))
    empty = ~seen.any(2, keepdims=True)
    bad = _spoil_columns(case, floats, hidden)
    bad["q"] = _spoil(bad["q"], empty)
    if case.bias is not None:
        masked = _whole_bias(case, ~case.seen())  # and not by its own -inf
        bad["bias"] = _spoil(bad["bias"], masked)
    wanted = run(floats, case.rest(), cotangents)
    d_out, *others = cotangents
    if not case.sink:  # a sink's own statistics depend on the sink
        others = [_spoil(c, empty) for c in others]
    got = run(bad, case.rest(), [_spoil(d_out, empty), *others])
    for label, a, b in zip(STATISTICS, got[0], wanted[0], strict=True):
        assert error(a, b) <= 1e-6, label
    for label in floats:
        assert error(got[1][label], wanted[1][label]) <= 1e-6, label
    for gradient in _columns(case, got[1]):
        assert not np.asarray(gradient)[hidden].any()
    assert not np.asarray(got[1]["q"])[empty[..., 0]].any()


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", MIDDLE)
def test_a_bad_key_reaches_the_rows_that_see_it_alone(name, which):
    """And through them what those rows see: nothing else, in any gradient."""
    case = CASES[name]
    floats, cotangents = case.floats(), case.cotangents()
    run, seen = case.program(), _seen(case, floats)
    column = np.arange(case.columns) == MIDDLE[name]
    spoilt = np.broadcast_to(column, (case.heads[1], case.columns))
    dirty = (seen & column).any(2)
    assert dirty.any() and not dirty.all()
    reached = seen & dirty[..., None]
    bad = _spoil_columns(case, floats, spoilt, which)
    wanted = run(floats, case.rest(), cotangents)
    got = run(bad, case.rest(), cotangents)
    for label, a, b in zip(STATISTICS, got[0], wanted[0], strict=True):
        assert error(np.asarray(a)[~dirty], np.asarray(b)[~dirty]) <= 1e-6, label
    assert not np.isfinite(np.asarray(got[0][0])[dirty]).all(-1).any()
    clean = ~_by_key_head(case, reached).any((1, 2))
    pairs = zip(_columns(case, got[1]), _columns(case, wanted[1]), strict=True)
    for a, b in pairs:
        assert error(a[clean], b[clean]) <= 1e-6
    same = {"q": ~dirty, "sink": ~dirty.any(1)}
    if case.bias is not None:
        same["bias"] = _whole_bias(case, ~reached)
    for label in same.keys() & floats.keys():
        a, b = (np.asarray(x[1][label])[same[label]] for x in (got, wanted))
        assert error(a, b) <= 1e-6, label
