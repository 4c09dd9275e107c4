"""Functions whose derivative is a rule of their own, wherever they stand.

A rule of `jax.custom_jvp` is forgotten by a `lax.scan` that is differentiated in
reverse: the second derivative is then that of the function's body, and where the body
rounds, or reads bits, it is silently 0. A primitive keeps its rule.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class OwnDerivative:
    """A function of arrays as one primitive, with the rule that differentiates it.

    It is called as the function is: positional arguments are arrays, keyword arguments
    hashable settings. It returns an array, or a tuple of two or more. An axis that it
    or its rule communicates over is one of the settings.

    Args:
        fun: `fun(*operands, **settings)`.
        rule: `rule(primals, tangents, **settings)` gives the tangents of what `fun`
            returns: linear in `tangents`, which are `None` for integer operands.
    """

    def __init__(self, fun: Callable, rule: Callable):
        functools.update_wrapper(self, fun)
        self._fun, self._rule = fun, rule
        self._jitted = functools.cache(self._build)
        self._p = p = Primitive(fun.__name__.strip("_"))
        p.multiple_results = True
        p.def_impl(lambda *operands, **params: self._jitted(**params)(*operands))
        p.def_abstract_eval(lambda *avals, **params: self._types(*avals, **params))
        ad.primitive_jvps[p] = self._jvp
        batching.fancy_primitive_batchers[p] = self._batch
        mlir.register_lowering(p, self._lower)

    def __call__(self, *operands: Any, **settings: Any) -> Any:
        params: dict[str, Any] = dict(settings=tuple(sorted(settings.items())), axes=())
        outs = self._p.bind(*map(jnp.asarray, operands), **params)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _build(self, *, settings, axes):
        def fun(*operands):
            return _listed(self._fun(*operands, **dict(settings)))

        for dims, name, size in reversed(axes):  # the innermost stands last
            fun = jax.vmap(fun, dims, axis_name=name, axis_size=size)
        fun.__name__ = fun.__qualname__ = self._p.name
        return jax.jit(fun)

    def _types(self, *avals, **params):
        return list(self._jitted(**params).trace(*avals).out_avals)

    def _lower(self, ctx, *operands, **params):
        return mlir.lower_fun(self._jitted(**params))(ctx, *operands)

    def _batch(self, axis, operands, dims, *, settings, axes):
        """Notes dims, name and size of one more axis, in front of those inside it."""
        name = axis.name if isinstance(axis.name, str) else None
        # Unmapped operands come here too, for what communicates over the axis.
        told = [value for _, value in settings if isinstance(value, str)]
        if name in told or any(dim is not None for dim in dims):
            axes = ((tuple(dims), name, axis.size), *axes)
            outs = self._p.bind(*operands, settings=settings, axes=axes)
            return outs, [0] * len(outs)
        outs = self._p.bind(*operands, settings=settings, axes=axes)
        return outs, [None] * len(outs)

    def _jvp(self, primals, tangents, *, settings, axes):
        outs = self._p.bind(*primals, settings=settings, axes=axes)
        if all(isinstance(t, ad.Zero) for t in tangents):
            return outs, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
        moving = [
            ad.instantiate_zeros(t) if jnp.issubdtype(x.dtype, jnp.inexact) else None
            for x, t in zip(primals, tangents, strict=True)
        ]

        def rule(primals, tangents):
            return _listed(self._rule(primals, tangents, **dict(settings)))

        for dims, name, size in reversed(axes):
            both = list(dims), list(dims)
            rule = jax.vmap(rule, both, axis_name=name, axis_size=size)
        return outs, rule(list(primals), moving)


def _listed(out: Any) -> list[jax.Array]:
    return list(out) if isinstance(out, tuple) else [out]


def own_derivative(rule: Callable) -> Callable[[Callable], OwnDerivative]:
    """Marks a function whose tangents are what `rule` says; see `OwnDerivative`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> through = own_derivative(lambda primals, tangents: tangents[0])(jnp.round)
        >>> cubes = lambda x: through(x) ** 3
        >>> jax.grad(cubes)(1.9).item(), jax.grad(jax.grad(cubes))(1.9).item()
        (12.0, 12.0)
    """
    return lambda fun: OwnDerivative(fun, rule)
