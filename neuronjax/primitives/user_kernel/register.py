"""`neuronjax.register_kernel`: gives a function a NAME and everything a macro has."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from neuronjax.kernels.dtypes import is_differentiable
from neuronjax.primitives import contracts, registry
from neuronjax.primitives.macro import MacroFamily
from neuronjax.primitives.user_kernel import example as examples
from neuronjax.primitives.user_kernel.leaves import Leaf, backward_leaf, forward_leaf
from neuronjax.primitives.user_kernel.rules import facts, odd_names
from neuronjax.primitives.user_kernel.signature import Signature, require_arrays

Outputs = Sequence[str] | Callable[..., Sequence[str]]


@contracts.contracted(facts)
def register_kernel(
    name: str,
    kernel: Callable | None = None,
    *,
    backward: Callable | None = None,
    plain: Callable | None = None,
    outputs: Outputs | None = None,
    example: Callable[[Any, int], Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    static: Callable | None = None,
    refuses: Mapping[str, str] | None = None,
    no_derivative: str | None = None,
) -> Callable:
    """Makes a function a macro with a NAME, and returns its emitter.

    The emitter is called as the function is, and binds one macro: `vmap` of it is one
    macro, its gradient another one, it exports as `neuron.<NAME>`, and
    `neuronjax.trace` lists it. Parameters before `*` are operands: arrays, pytrees of
    them, or `None`. Those after `*` are settings: hashable Python values, which are the
    macro's config.

    Args:
        name: the NAME: a Python identifier that begins with a capital, and no NAME of
            the catalog. A NAME of this function's is replaced, so that the cell of a
            notebook can run twice; programs that are compiled keep what they hold.
        kernel: the function: it returns an array, or a tuple of them if `outputs` says
            so. Without it, `register_kernel` is a decorator.
        backward: `backward(operands, outs, cotangents, **settings)`, where `operands`
            is a tuple and the others are as the function returns, returns a tuple with
            one gradient for each operand: `None` for integers, zeros where there is no
            derivative. It becomes the macro `<NAME>Bwd`, which JAX differentiates for
            second order. A cotangent that nothing asked for is zeros. Without
            `backward`, JAX differentiates the function.
        plain: the same computation by its equation, with the signature of `kernel`:
            what runs under `neuronjax.plain()`, and what the transformation table
            compares with. The function itself unless given.
        outputs: the names of a tuple's arrays, or a function of the settings that gives
            them. Their checkpoint names, for remat policies, are `<NAME>_<output>`;
            that of a single array is `<NAME>_out`.
        example: `example(dtype, batch)` gives small operands, from which
            `neuronjax.check_transformations`, `neuronjax.verify` and `gradcheck` run:
            a tuple, of which an axis that follows `batch` is one that a mesh may
            split (outputs without such an axis are sums over the batch), or a
            `neuronjax.Example`.
        settings: the settings of the example that differ from the defaults.
        static: the function with static loop bounds, where it has a loop with a bound
            that is computed, which JAX cannot transpose.
        refuses: transformation of the table -> why this kernel refuses it.
        no_derivative: why it has no derivative; differentiating refuses so.

    Returns:
        The emitter, or a decorator that returns it. It raises a `ValueError` while
        tracing if the function returns other than it should, or if a gradient has not
        the structure and shape of its operand.

    Raises:
        ValueError: the arguments break a rule; one error lists all of them.

    Example:
        >>> import jax, jax.numpy as jnp, neuronjax
        >>> @register_kernel("Softplus")
        ... def softplus(x, *, beta=1.0):
        ...     return jnp.log1p(jnp.exp(beta * x)) / beta
        >>> neuronjax.trace(softplus, jnp.ones(3)).names
        ('Softplus',)
        >>> jax.grad(softplus)(0.0).item()
        0.5
    """
    options: dict[str, Any] = dict(
        backward=backward,
        plain=plain,
        outputs=outputs,
        example=example,
        settings=settings,
        static=static,
        refuses=refuses,
        no_derivative=no_derivative,
    )
    if kernel is None:
        return functools.partial(register_kernel, name, **options)
    _replace(name, kernel, backward)
    family = _families(name, kernel, **options)
    return _emitter(name, kernel, family, single=outputs is None)


def _replace(name: str, function: Callable, backward: Callable | None) -> None:
    """Takes back what the NAME was, and enters what it is."""
    own = f"{name}Bwd"
    if name in registry.USERS:
        registry.withdraw(name)
    if own in registry.USERS and not registry.USERS[own].emitter:
        registry.withdraw(own)
    registry.enter(_entry(name, function, emitter=True))
    if backward is not None:
        registry.enter(_entry(own, backward, emitter=False))


def _entry(name: str, function: Callable, emitter: bool) -> registry.Entry:
    own = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", None) or "__main__"
    word = own.split(".")[-1] if emitter else ""
    return registry.Entry(name, f"{module}.{own}", "generic", word)


def _families(
    name: str,
    function: Callable,
    *,
    backward: Callable | None,
    plain: Callable | None,
    outputs: Outputs | None,
    example: Callable | None,
    settings: Mapping[str, Any] | None,
    static: Callable | None,
    refuses: Mapping[str, str] | None,
    no_derivative: str | None,
) -> MacroFamily:
    """The family of the NAME, and that of its backward."""
    signature = Signature.of(function)
    names = functools.partial(_names, name, outputs)
    leaf = forward_leaf(function, names, signature)
    reference = leaf if plain is None else forward_leaf(plain, names, signature)
    build = examples.none_given(name)
    if example is not None:
        bag = {**signature.defaults(), **(settings or {})}
        build = examples.forward_example(example, reference, signature, bag)
    emit = None
    if backward is not None:
        run = backward_leaf(backward, signature, outputs is None)
        drawn = examples.backward_example(build, name, reference, signature)
        emit = _emits(_backward_family(f"{name}Bwd", run, drawn, refuses), signature)
    return MacroFamily(
        name,
        (name,),
        leaf,
        plain=reference,
        outputs=lambda **settings: names(**settings) or ("out",),
        static=None if static is None else forward_leaf(static, names, signature),
        backward=emit,
        example=build,
        refuses=refuses,
        no_derivative=no_derivative,
    )


def _names(
    name: str, outputs: Outputs | None, /, **settings: Any
) -> tuple[str, ...] | None:
    """The names of a tuple's arrays for some settings; `None` for a single array."""
    if outputs is None:
        return None
    found = outputs(**settings) if callable(outputs) else outputs
    if odd_names(found):
        raise ValueError(
            f"{name}: outputs must give different identifiers, one for each array of a "
            f"tuple, got {found!r}"
        )
    return tuple(found)


def _backward_family(
    name: str, run: Leaf, example: Callable, refuses: Mapping[str, str] | None
) -> MacroFamily:
    """The backward is its own reference: that of the NAME checks its values."""
    return MacroFamily(
        name,
        (name,),
        run,
        plain=run,
        outputs=lambda gradients, **settings: gradients,
        example=example,
        refuses=refuses,
    )


def _emits(family: MacroFamily, signature: Signature) -> Callable[..., tuple]:
    """What differentiation calls: it emits the backward macro."""

    def backward(operands, outs, cotangents, /, *, name, **settings):
        seeds = tuple(
            jnp.zeros_like(out)
            if seed is None and is_differentiable(out.dtype)
            else seed
            for out, seed in zip(outs, cotangents, strict=True)
        )
        names = examples.gradient_names(signature, operands)
        (macro,) = family.names
        given = operands, tuple(outs), seeds
        found = iter(family(*given, name=macro, gradients=names, **settings))
        leaves, tree = jax.tree.flatten(operands)
        grads = [next(found) if is_differentiable(x.dtype) else None for x in leaves]
        return jax.tree.unflatten(tree, grads)

    return backward


def _emitter(
    name: str, function: Callable, family: MacroFamily, single: bool
) -> Callable:
    signature = Signature.of(function)

    @functools.wraps(function)
    def emit(*args: Any, **kwargs: Any) -> Any:
        operands, settings = signature.split(args, kwargs)
        require_arrays(name, signature, operands)
        outs = family(*operands, name=name, **settings)
        return outs[0] if single else outs

    return emit
