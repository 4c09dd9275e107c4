"""The macro primitive: one class, every transformation. It knows no family.

A family of macros is one JAX primitive. The NAME is a static parameter that abstract
evaluation, lowering and batching all read, so the tiled/untiled split lives in the
rules.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from neuronjax.context import settings
from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.kernels.shard_common import laid_like, uniform
from neuronjax.primitives import registry
from neuronjax.primitives.bag import bag_of
from neuronjax.primitives.composite import composite
from neuronjax.primitives.contracts import FOREIGN_NAME
from neuronjax.primitives.table import DERIVATIVES
from neuronjax.primitives.table import Example as Example

Outputs = tuple[str, ...] | Callable[..., tuple[str, ...]]


class MacroFamily:
    """One primitive per family of macros.

    Three rules carry the design:

    - batching binds the same NAME again, one level of `axes` deeper: a mapped macro is
      one macro;
    - differentiation emits the macro plus `tangent_p`, linear in its last operands,
      which are the tangents of the operands `wrt`. Forward mode evaluates it, reverse
      mode transposes it into the backward macro;
    - abstract evaluation traces the jitted leaf, so types cannot drift from the math,
      and the 30th identical layer is a look-up.

    Args:
        family: the primitive's name, and the first part of the checkpoint names
            `<family>_<output>`.
        names: the NAMEs it answers to; any other is refused.
        leaf: `leaf(*operands, name, **config)` returns a tuple of arrays.
        plain: the same signature, written straight from the equations; what runs under
            `neuronjax.plain()`.
        outputs: a name for each output of the leaf, or a function of the config that
            gives them.
        backward: `backward(operands, outs, cotangents, name, **config)` returns one
            gradient per operand (`None` for an integer or absent one) and emits the
            backward macro. A cotangent is `None` where nothing used that output; that
            of EVERY output counts, or second order is silently wrong. Without
            `backward`, the leaf's own vjp is taken.
        static: the leaf with static loop bounds, for the one place where a leaf
            itself is transposed: grad of grad.
        tangent_leaf: the leaf that tangents are pushed through, where `leaf` reads
            bits, which have no derivative.
        differentiated: the config bag of the macro that differentiation emits instead
            of the one that was asked for. Its first outputs are the same; those beyond
            are for the backward alone.
        axis: the key of the config bag that names a mesh axis, if its cores cooperate
            in the leaf. There operands keep their types: the gradient of one that all
            cores hold alike must come out alike, summed by the leaf.
        over: the key of the config bag that names the mesh axis of a collective: all
            operands are cast to vary over it.
        guard: the NAMEs that the refusal of a foreign one lists.
        foreign: the words of that refusal, over `expected` and `name`.
        example: `example(name, dtype, batch)` gives an `Example`.
        variants: more examples, `"<NAME> (<what differs>)"`, where one NAME has two
            forms.
        reemits: how many macros of its own NAMEs its backward emits, where a gradient
            is the same kind of work again. The rest of a gradient has other NAMEs.
        keyed: its NAMEs belong to another family, and this one has an emitter of its
            own that is told a NAME.
        refuses: transformation -> why this family refuses it. With "explicit sharding"
            operands that an explicit mesh divides are refused, with "export, symbolic
            batch" symbolic sizes.
        no_derivative: why its outputs have no derivative; differentiating refuses so.

    Quantized operands (integers and fp8) are constants: they have no derivative.
    """

    def __init__(
        self,
        family: str,
        names: Sequence[str],
        leaf: Callable[..., tuple],
        *,
        plain: Callable[..., tuple],
        outputs: Outputs,
        example: Callable[[str, Any, int], Example],
        backward: Callable[..., tuple] | None = None,
        static: Callable[..., tuple] | None = None,
        tangent_leaf: Callable[..., tuple] | None = None,
        differentiated: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        axis: str = "",
        over: str = "",
        guard: Sequence[str] = (),
        foreign: str = FOREIGN_NAME,
        variants: Sequence[str] = (),
        reemits: int = 0,
        keyed: bool = False,
        refuses: Mapping[str, str] | None = None,
        no_derivative: str | None = None,
    ):
        self.family, self.names, self.guard = family, tuple(names), guard or names
        self.foreign, self.no_derivative = foreign, no_derivative
        self.leaf, self.static, self.plain = leaf, static or leaf, plain
        self.tangent_leaf = tangent_leaf or leaf
        self.outputs, self.backward = outputs, backward
        self.differentiated, self.axis = differentiated, axis
        self.over, self.reemits = over, reemits
        self.example, self.variants, self.keyed = example, tuple(variants), keyed
        self.refuses = dict(refuses or {})
        if no_derivative is not None:
            self.refuses |= dict.fromkeys(DERIVATIVES, no_derivative)
        self._fun = functools.cache(self._build_fun)
        self._tangent_fun = functools.cache(self._build_tangent_fun)
        self.macro_p = Primitive(family)
        self.tangent_p = Primitive(f"{family}_tangent")
        self._define(self.macro_p, self._fun, self._jvp)
        self._define(self.tangent_p, self._tangent_fun, self._tangent_jvp)
        self.macro_p.def_abstract_eval(self._abstract_eval)
        self.tangent_p.def_abstract_eval(self._tangent_abstract_eval)
        ad.primitive_transposes[self.tangent_p] = self._transpose
        registry.declare(self)

    def _define(self, p: Primitive, fun: Callable, jvp: Callable) -> None:
        p.multiple_results = True
        # A cached jit: a fresh one would trace again at every eager call.
        p.def_impl(lambda *operands, **params: fun(**params)(*operands))
        batching.fancy_primitive_batchers[p] = functools.partial(self._batch, p)
        ad.primitive_jvps[p] = jvp
        mlir.register_lowering(p, functools.partial(self._lower, fun))

    def __call__(self, /, *operands: Any, name: str, **config: Any) -> tuple:
        """Binds the macro NAME; returns the leaf's outputs."""
        self._require_own(name)
        for key, value in config.items():
            _require_static(name, key, value)
        if settings().plain:
            return tuple(self.plain(*operands, name=name, **config))
        if settings().fallback and registry.is_of(name, self):
            return registry.fallback()(
                *operands, name=registry.FALLBACK, kernel_name=name, **config
            )
        leaves, tree = jax.tree.flatten(operands)
        family = self.served(config)
        cast = dict(but=config.get(family.axis), over=config.get(family.over))
        leaves = uniform(*map(jnp.asarray, leaves), **cast)
        params: dict[str, Any] = dict(name=name, config=bag_of(config), tree=tree)
        outs = tuple(self.macro_p.bind(*leaves, **params, axes=()))
        watch = settings().watch
        if watch is not None:
            watch(self, leaves, params, outs)
        return outs

    def served(self, config: Mapping[str, Any]) -> "MacroFamily":
        """The family whose axes and refusals hold: of `BIRKernel` that of its leaf."""
        return self

    def output_names(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The checkpoint names of the outputs that a config gives."""
        names = self.outputs(**config) if callable(self.outputs) else self.outputs
        return tuple(f"{self.family}_{name}" for name in names)

    def _require_own(self, name: str) -> None:
        if name not in self.names:
            expected = " or ".join(self.guard)
            raise ValueError(self.foreign.format(expected=expected, name=name))

    def _require_undivided(self, name: str, leaves: Sequence[Any], config) -> None:
        reason = self.served(config).refuses.get("explicit sharding")
        if reason and any(any(jax.typeof(x).sharding.spec) for x in leaves):
            raise NotImplementedError(f"{name}: {reason}")

    def forget(self) -> None:
        """Drops what was compiled: a user's NAME has another leaf now."""
        self._fun.cache_clear()
        self._tangent_fun.cache_clear()

    def static_call(self, **params: Any) -> Any:
        """What an equation of this family computes, jitted, with static loop bounds."""
        return self._fun(**params, static=True)

    def _build_fun(self, *, name, config, tree, axes, static=False):
        """The jitted math: flat operands to a list of outputs, under the NAME."""
        self._require_own(name)
        leaf = self.static if static else self.leaf

        def fun(*leaves):
            self._require_undivided(name, leaves, dict(config))
            operands = jax.tree.unflatten(tree, leaves)
            return list(leaf(*operands, name=name, **dict(config)))

        return _jit(fun, name, axes)

    def _build_tangent_fun(self, *, wrt, name, config, tree, axes, static=False):
        """The leaf's derivative: (operands, outputs, tangents) to output tangents."""
        self._require_own(name)
        leaf = self.static if static else self.tangent_leaf
        n = tree.num_leaves

        def fun(*operands):
            # The outputs between operands and tangents are there for the transpose.
            live = _floats_of(leaf, wrt, operands[:n], tree, name=name, **dict(config))
            tangents = operands[len(operands) - len(wrt) :]
            return jax.jvp(live, [operands[i] for i in wrt], list(tangents))[1]

        return _jit(fun, f"{name}_tangent", axes)

    def _abstract_eval(self, *avals, **params):
        return list(self._fun(**params).trace(*avals).out_avals)

    def _tangent_abstract_eval(self, *avals, wrt, tree, **_):
        outs = avals[tree.num_leaves : len(avals) - len(wrt)]
        return [out.to_tangent_aval() for out in outs if _is_float(out)]

    def _lower(self, fun, ctx, *operands, **params):
        family = self.served(dict(params["config"]))
        reason = family.refuses.get("export, symbolic batch")
        if reason and any(map(_is_symbolic, ctx.avals_in)):
            raise NotImplementedError(f"{params['name']}: {reason}")
        call = fun(**params)
        if settings().route == "composite" and "wrt" not in params:
            call = composite(call, ctx, params)
        return mlir.lower_fun(call)(ctx, *operands)

    def _batch(self, p, axis, operands, dims, *, tree, axes, **params):
        operands, dims = list(operands), list(dims)
        config = dict(params["config"])
        family = self.served(config)
        if axis.name is not None and axis.name == config.get(family.over):
            # The ranks of a collective: even operands that are alike on all of them.
            operands[0] = batching.bdim_at_front(operands[0], dims[0], axis.size)
            dims[0] = 0
        mapped = any(dim is not None for dim in dims)
        if mapped:
            # Outputs that a tangent holds are mapped alike, whatever the operands are.
            last = len(operands) - len(params.get("wrt", ()))
            for i in range(tree.num_leaves, last):
                operands[i] = batching.bdim_at_front(operands[i], dims[i], axis.size)
                dims[i] = 0
            name = axis.name if isinstance(axis.name, str) else None
            axes = ((tuple(dims), name), *axes)
            # Those that are mapped may vary over one mesh axis more: `spmd_axis_name`.
            arrays = map(jnp.asarray, operands)
            operands = uniform(*arrays, but=config.get(family.axis))
        outs = p.bind(*operands, tree=tree, axes=axes, **params)
        return outs, [0 if mapped else None] * len(outs)

    def _jvp(self, primals, tangents, *, axes, config, **params):
        reason = self.served(dict(config)).no_derivative
        if reason is not None:
            raise NotImplementedError(f"{params['name']}: {reason}")
        wrt = tuple(
            i
            for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
            if _is_float(x) and not isinstance(t, ad.Zero)
        )
        asked = len(self.output_names(dict(config)))
        if wrt:
            config = bag_of(self.differentiated(dict(config)))
        outs = self.macro_p.bind(*primals, axes=axes, config=config, **params)
        # Named before the tangent takes them: named any later, remat would run the
        # forward macro again.
        names = self.output_names(dict(config))
        outs = [checkpoint_name(out, n) for out, n in zip(outs, names, strict=True)]
        if not wrt:
            return outs, list(map(_zero, outs))
        axes = tuple(
            ((*dims, *[0] * len(outs), *[dims[i] for i in wrt]), axis)
            for dims, axis in axes
        )
        params |= dict(wrt=wrt, axes=axes, config=config)
        live = [tangents[i] for i in wrt]
        dots = iter(self.tangent_p.bind(*primals, *outs, *live, **params))
        dots = [next(dots) if _is_float(out) else _zero(out) for out in outs]
        return outs[:asked], dots[:asked]

    def _tangent_jvp(self, operands, tangents, *, wrt, tree, **params):
        m, params = len(operands) - len(wrt), dict(params, wrt=wrt, tree=tree)
        outs = self.tangent_p.bind(*operands, **params)
        terms = [[_zero(out) for out in outs]]
        if not all(isinstance(t, ad.Zero) for t in tangents[m:]):
            # Linear there: the same primitive again, so still the backward macro.
            moving = map(ad.instantiate_zeros, tangents[m:])
            terms.append(self.tangent_p.bind(*operands[:m], *moving, **params))
        moved = [
            i for i in range(tree.num_leaves) if not isinstance(tangents[i], ad.Zero)
        ]
        if moved:
            # This may be pushed forward or transposed: the static form can do both.
            def fun(*live):
                tangent = self._tangent_fun(**params, static=True)
                return tangent(*_replace(operands, moved, live))

            primals, dots = zip(
                *((operands[i], tangents[i]) for i in moved), strict=True
            )
            terms.append(jax.jvp(fun, primals, dots)[1])
        return outs, [
            functools.reduce(ad.add_tangents, dots) for dots in zip(*terms, strict=True)
        ]

    def _transpose(self, cotangents, *operands, wrt, name, config, tree, axes):
        n, m = tree.num_leaves, len(operands) - len(wrt)
        used = iter([None if isinstance(c, ad.Zero) else c for c in cotangents])
        cotangents = [next(used) if _is_float(out) else None for out in operands[n:m]]

        def gradients(primals, outs, cotangents):
            emits = self.served(dict(config)).backward is not None
            pull = self._emit_backward if emits else self._own_vjp
            grads = pull(primals, outs, cotangents, wrt, tree, name, dict(config))
            casts = [
                g.astype(primals[i].dtype) for i, g in zip(wrt, grads, strict=True)
            ]
            return [uniform(g, primals[i])[0] for i, g in zip(wrt, casts, strict=True)]

        pulled: Callable = gradients
        for dims, axis_name in reversed(axes):
            pulled = _vmap_and_sum(pulled, dims[:n], dims[n:m], dims[m:], axis_name)
        grads = pulled(list(operands[:n]), list(operands[n:m]), cotangents)
        return [None] * m + list(map(laid_like, grads, [operands[i] for i in wrt]))

    def _own_vjp(self, primals, outs, cotangents, wrt, tree, name, config):
        live = _floats_of(self.static, wrt, primals, tree, name=name, **config)
        seeds = [
            jnp.zeros_like(out) if c is None else uniform(jnp.asarray(c), out)[0]
            for out, c in zip(outs, cotangents, strict=True)
            if _is_float(out)
        ]
        return jax.vjp(live, *[primals[i] for i in wrt])[1](seeds)

    def _emit_backward(self, primals, outs, cotangents, wrt, tree, name, config):
        assert self.backward is not None
        operands = jax.tree.unflatten(tree, primals)
        grads = self.backward(operands, outs, cotangents, name=name, **config)
        grads = tree.flatten_up_to(tuple(grads))
        return [grads[i] for i in wrt]


def _is_float(x) -> bool:
    return is_differentiable(x.dtype)


def _is_symbolic(aval) -> bool:
    return not all(isinstance(size, int) for size in aval.shape)


def _zero(x) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _require_static(name: str, key: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{name}: {key} must be a hashable Python value (arrays are operands, not "
            f"settings), got {type(value).__name__}"
        ) from None


def _jit(fun, name, axes):
    for dims, axis_name in reversed(axes):  # the first level was mapped last
        fun = jax.vmap(fun, dims, axis_name=axis_name)
    fun.__name__ = fun.__qualname__ = name
    return jax.jit(fun)


def _replace(operands, where, values):
    new = dict(zip(where, values, strict=True))
    return [new.get(i, x) for i, x in enumerate(operands)]


def _floats_of(leaf, wrt, primals, tree, /, **config):
    """The leaf's float outputs as a function of the operands `wrt` alone."""

    def fun(*live):
        outs = leaf(*jax.tree.unflatten(tree, _replace(primals, wrt, live)), **config)
        return [out for out in outs if _is_float(out)]

    return fun


def _vmap_and_sum(gradients, primal_axes, out_axes, grad_axes, axis_name):
    """Maps a backward over an axis; sums gradients of operands not mapped there."""
    dims = (list(primal_axes), list(out_axes), 0)
    fun = jax.vmap(gradients, dims, axis_name=axis_name)

    def place(grad, axis):
        return grad.sum(0) if axis is None else jnp.moveaxis(grad, 0, axis)

    return lambda *args: list(map(place, fun(*args), grad_axes))
