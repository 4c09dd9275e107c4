"""Calls of `attention_cte`: operands, program, float64 reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import neuronjax
from tests.arrays import array
from tests.attention_equations import Attention, visible

STATISTICS = ("out", "neg_max", "recip")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options; `bias` and `mask` name their whole axes out of "hqk"."""

    q_seq: int
    kv_seq: int
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (5, 3)
    causal: bool = True
    scale: float = 0.6
    window: int | None = None
    prior: int | None = None
    used: int = 0
    sink: bool = False
    bias: str | None = None
    mask: str | None = None
    segments: tuple[int, ...] = ()
    offset: int | None = None
    degree: int | None = None
    strided: bool = False
    cap: float | None = None
    rate: float = 0.0
    layout: tuple[bool, bool, bool] = (True, True, False)

    @property
    def columns(self):
        """Slots of the prefix and keys."""
        return self.kv_seq + (self.prior or 0)

    def broadcast(self, axes):
        sizes = self.heads[0], self.q_seq, self.columns
        return tuple(n if a in axes else 1 for a, n in zip("hqk", sizes, strict=True))

    def floats(self, dtype=jnp.float32):
        """The operands with a gradient, sequence second, rounded to `dtype`."""
        rng = np.random.default_rng(self.q_seq + 7 * self.columns)
        (heads, kv_heads), (d, dv) = self.heads, self.widths
        shapes = dict(
            q=(heads, self.q_seq, d), k=(kv_heads, self.kv_seq, d), sink=(heads, 1)
        )
        shapes |= dict(v=(kv_heads, self.kv_seq, dv))
        if self.prior is not None:
            shapes |= dict(k_prior=(kv_heads, self.prior, d))
            shapes |= dict(v_prior=(kv_heads, self.prior, dv))
        if self.bias is not None:
            shapes |= dict(bias=self.broadcast(self.bias))
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        if self.bias is not None and "k" in self.bias and self.columns > 2:
            arrays["bias"][rng.random(arrays["bias"].shape) < 0.1] = -np.inf
        if not self.sink:
            del arrays["sink"]
        wide = "sink", "bias"  # float32 at least: the options of a call
        types = {n: jnp.float32 if n in wide and dtype != jnp.float64 else dtype
                 for n in arrays}  # fmt: skip
        return {name: array(x, types[name]) for name, x in arrays.items()}

    def rest(self):
        """The operands without a gradient, by argument name."""
        rest = {}
        if self.mask is not None:
            shape = self.broadcast(self.mask)
            mask = np.random.default_rng(5).random(shape) < 0.6
            if "q" in self.mask:
                mask[:, shape[1] // 2] = False  # a row that sees nothing
            rest["mask"] = jnp.asarray(mask)
        if self.prior is not None:
            rest["prior_used_len"] = jnp.full((1,), self.used, jnp.int32)
        if self.offset is not None:
            rest["cp_offset"] = jnp.full((1, 1), self.offset, jnp.int32)
        if self.segments:
            first, end = self.bounds
            rest["bound_min"] = jnp.asarray(first, jnp.float32)[:, None]
            rest["bound_max"] = jnp.asarray(end, jnp.float32)[:, None]
        if self.rate:
            rest["dropout_key"] = jax.random.key(11)
        return rest

    @property
    def bounds(self):
        """Each row's first column and end; rows past the segments see nothing."""
        ends = np.cumsum(self.segments)
        first = np.repeat(ends - self.segments, self.segments)
        rows = np.arange(self.q_seq)
        inside = np.minimum(rows, ends[-1] - 1)
        return (
            np.where(rows < ends[-1], x[inside], self.kv_seq)
            for x in (first, np.repeat(ends, self.segments))
        )

    def call(self, floats, rest, **options):
        """`attention_cte` in the case's layout; results with the sequence second."""
        tp_q, tp_k, tp_out = self.layout
        turned = dict(q=not tp_q, k=not tp_k, k_prior=not tp_k)
        operands = {n: x.mT if turned.get(n) else x for n, x in floats.items()}
        settings = dict(
            scale=self.scale,
            causal_mask=self.causal,
            sliding_window=self.window,
            global_cp_deg=self.degree,
            cp_strided_q_slicing=self.strided,
            logits_soft_cap=self.cap,
            dropout_rate=self.rate,
            cache_softmax=True,
            **dict(zip(("tp_q", "tp_k", "tp_out"), self.layout, strict=True)),
        )
        got = neuronjax.attention_cte(**operands, **rest, **(settings | options))
        out, *statistics = got if isinstance(got, tuple) else (got,)
        return (out.mT if tp_out else out, *statistics)

    def program(self, **options):
        """Outputs and gradients of `(floats, rest, cotangents)`, compiled once."""
        blank = {} if self.prior is None else {"used": 0}
        blank |= {} if self.offset is None else {"offset": 0}
        return _program(
            dataclasses.replace(self, **blank), tuple(sorted(options.items()))
        )

    def seen(self):
        return visible(
            self.q_seq,
            self.kv_seq,
            self.causal,
            self.rest().get("mask"),
            self.heads[0],
            window=self.window,
            prior=self.prior or 0,
            used=self.used,
            offset=self.offset or 0,
            stride=self.degree if self.strided else 1,
            bounds=tuple(self.bounds) if self.segments else None,
        )

    def reference(self, floats, keep=None):
        """The float64 attention of these operands."""
        x = {name: np.asarray(value, np.float64) for name, value in floats.items()}
        k, v = (
            np.concatenate([x[f"{n}_prior"], x[n]], 1) if f"{n}_prior" in x else x[n]
            for n in "kv"
        )
        options = dict(bias=x.get("bias"), sink=x.get("sink"), cap=self.cap)
        options |= dict(keep=keep, rate=self.rate)
        return Attention(x["q"], k, v, self.seen(), self.scale, **options)

    def split(self, grads):
        """The reference's gradients by argument: those of the prefix apart."""
        if self.prior is None:
            return grads
        parts = {n: np.split(grads[n], [self.prior], 1) for n in "kv"}
        prior = {f"{n}_prior": parts[n][0] for n in "kv"}
        return grads | prior | {n: parts[n][1] for n in "kv"}

    def cotangents(self):
        """Of `out`, `neg_max` and `recip`."""
        rng = np.random.default_rng(3)
        rows = self.heads[0], self.q_seq
        return [
            jnp.asarray(rng.normal(size=(*rows, n)), jnp.float32)
            for n in (self.widths[1], 1, 1)
        ]

    def kept(self):
        """Which weights dropout keeps, read from equal weights and one-hot values."""
        columns = np.eye(self.columns, dtype=np.float32)
        floats = {n: jnp.zeros_like(x) for n, x in self.floats().items()}
        whole = np.broadcast_to(columns, (self.heads[1], *columns.shape))
        prior, values = np.split(whole, [self.prior or 0], 1)
        floats["v"] = jnp.asarray(values)
        if self.prior is not None:
            floats["v_prior"] = jnp.asarray(prior)
        return np.asarray(jax.jit(self.call)(floats, self.rest())[0]) > 0

    def plain(self, floats):
        """The output in the operands' dtype throughout, scores and weights whole."""
        dtype, group = floats["q"].dtype, self.heads[0] // self.heads[1]
        x = {name: value.astype(dtype) for name, value in floats.items()}
        k, v = (
            jnp.concatenate([x[f"{n}_prior"], x[n]], 1) if f"{n}_prior" in x else x[n]
            for n in "kv"
        )
        k, v = (jnp.repeat(x, group, 0) for x in (k, v))
        z = jnp.einsum("hqd,hkd->hqk", x["q"] * jnp.asarray(self.scale, dtype), k)
        z = z if self.cap is None else self.cap * jnp.tanh(z / self.cap)
        z = z + x["bias"] if "bias" in x else z
        seen = self.seen()
        z = jnp.where(seen, z, jnp.asarray(-1e9, dtype))
        if "sink" in x:
            sink = jnp.broadcast_to(x["sink"][..., None], (*z.shape[:2], 1))
            z = jnp.concatenate([z, sink], -1)
        p = jnp.where(seen, jax.nn.softmax(z, -1)[..., : k.shape[1]], 0)
        return jnp.einsum("hqk,hkd->hqd", p, v)


@functools.cache
def _program(case, options):
    @jax.jit
    def run(floats, rest, cotangents):
        outs, pull = jax.vjp(
            lambda floats: case.call(floats, rest, **dict(options)), floats
        )
        seeds = (c.astype(x.dtype) for c, x in zip(cotangents, outs, strict=True))
        return outs, pull(tuple(seeds))[0]

    return run


# Lengths past 256 have several blocks, one of them not whole.
CASES = dict(
    one=Case(1, 1, sink=True),
    plain=Case(255, 257, heads=(3, 1), causal=False, layout=(False, True, True)),
    window_of_one=Case(17, 9, window=1, heads=(2, 2), layout=(False, False, False)),
    long_window=Case(300, 300, window=100, sink=True, layout=(False, False, True)),
    window_past_a_block=Case(300, 257, window=259, heads=(2, 1)),
    sink=Case(257, 300, sink=True, causal=False, heads=(6, 2), cap=6.0),
    prefix=Case(17, 17, prior=30, used=13, layout=(True, False, False)),
    long_prefix=Case(257, 257, prior=300, used=290, heads=(3, 1), window=40, sink=True),
    full_prefix=Case(17, 17, prior=9, used=9, causal=False, bias="hqk", mask="k"),
    packed=Case(300, 300, segments=(100, 3, 190), causal=False, heads=(2, 1)),
    packed_causal=Case(300, 300, segments=(1, 270), bias="hk", sink=True),
    slice=Case(33, 300, offset=260, degree=4, layout=(False, False, False)),
    strided=Case(
        75, 300, offset=1, degree=4, strided=True, window=50, sink=True, heads=(2, 2)
    ),
    bias=Case(17, 300, bias="qk", causal=False),
    bias_of_rows=Case(257, 17, bias="q", mask="qk", cap=2.0),
    bias_of_heads=Case(17, 17, bias="h", mask="hqk", sink=True),
    one_bias=Case(
        9, 17, bias="", mask="hk", window=4, cap=0.8, layout=(True, False, True)
    ),
    mask_of_rows=Case(257, 257, mask="q", sink=True, window=30, heads=(2, 1)),
    whole=Case(
        33, 290, prior=20, used=7, bias="hqk", mask="q", window=30, sink=True,
        cap=3.0, offset=200, degree=2,
    ),
)  # fmt: skip
DROPPED = dict(
    dropout=Case(17, 300, rate=0.4, causal=False, sink=True),
    dropped_prefix=Case(17, 17, rate=0.7, prior=9, used=5, window=6),
    dropped_cap=Case(270, 270, rate=0.5, cap=2.0, bias="hqk", heads=(2, 1)),
)


def error(got, wanted):
    """The largest error relative to the largest wanted number; infinities are equal."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    size = np.abs(wanted[finite]).max(initial=0)
    return np.abs(got[finite] - wanted[finite]).max(initial=0) / (size or 1)
