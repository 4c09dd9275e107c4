"""What a workload file declares: its cases, its sides, its targets.

Only the standard library is imported here: a worker of the PyTorch side runs in an
interpreter that has no JAX.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def as_list(out: Any) -> list:
    """The arrays of an output, which is one array or a sequence of them."""
    return list(out) if isinstance(out, list | tuple) else [out]


@dataclasses.dataclass(frozen=True)
class Work:
    """One prepared computation.

    Attributes:
        run: does the whole of it and waits for the result.
        outputs: turns the result into arrays in the layout that all sides share.
        facts: numbers known before the first run, such as compile seconds.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], list] = as_list
    facts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to do the work.

    Attributes:
        build: makes the inputs of a case and compiles.
        interpreter: `jax`, `torch` or `peers`: which Python runs it.
        devices: host devices that XLA is asked for.
        skip: says why a case is not run, or `""`.
    """

    build: Callable[[Case], Work]
    interpreter: str = "jax"
    devices: int = 1
    skip: Callable[[Case], str] = lambda case: ""


def slow_bfloat16(case: Case) -> str:
    """Why PyTorch sides skip bfloat16 on a processor without AVX-512.

    One product of 2048 x 1024 x 2816 takes it half a minute there.
    """
    with open("/proc/cpuinfo") as cpuinfo:
        fast = "avx512" in cpuinfo.read()
    slow = case["dtype"] == "bfloat16" and not fast
    return "PyTorch's bfloat16 needs AVX-512" if slow else ""


@dataclasses.dataclass(frozen=True)
class Target:
    """A limit on what `side` may take, in units of what `against` took.

    Attributes:
        measure: `ms`, `run_mb` or `compile_s` (trace and compile).
        against: the peer; `""` makes `at_most` an absolute number.
    """

    side: str
    cases: str
    measure: str
    at_most: float
    against: str = ""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The first side that runs is the one that outputs and ratios are compared with.

    Attributes:
        ideal: the `flops` and `bytes` that no side can avoid in a case.
    """

    name: str
    title: str
    cases: Mapping[str, Case]
    sides: Mapping[str, Side]
    ideal: Callable[[Case], dict[str, float]]
    targets: Sequence[Target] = ()


def jax_work(f: Callable, *args: Any, outputs: Callable[[Any], list] = as_list) -> Work:
    """Compiles `f(*args)` ahead of time, and reports seconds and XLA's temporaries."""
    import jax

    compiled, facts = jax_compile(jax.jit(f), *args)
    return Work(lambda: jax.block_until_ready(compiled(*args)), outputs, facts)


def jax_compile(jitted: Any, *args: Any) -> tuple[Any, dict[str, float]]:
    """The compiled program, and what tracing and compiling it took."""
    start = time.perf_counter()
    lowered = jitted.lower(*args)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    facts = {
        "trace_s": traced - start,
        "compile_s": done - traced,
        "temp_mb": memory.temp_size_in_bytes / 2**20,
        "out_mb": memory.output_size_in_bytes / 2**20,
    }
    return compiled, facts


def jax_forward_backward(f: Callable, *args: Any, **options: Any) -> Work:
    """The work of `f` and of its vjp; the last of `args` is the cotangent."""
    import jax

    def both(*operands_and_cotangent):
        *operands, cotangent = operands_and_cotangent
        out, pull = jax.vjp(f, *operands)
        return (out, *pull(cotangent))

    return jax_work(both, *args, **options)


def torch_work(
    f: Callable,
    inputs: Sequence[Any],
    *,
    backward: bool,
    outputs: Callable[[Any], list] = as_list,
) -> Work:
    """The same two forms in PyTorch; the last of `inputs` is the cotangent."""
    import torch

    *operands, cotangent = inputs
    if not backward:

        def forward():
            with torch.no_grad():
                return f(*operands)

        return Work(forward, outputs)
    for operand in operands:
        operand.requires_grad_()

    def both():
        for operand in operands:
            operand.grad = None
        out = f(*operands)
        out.backward(cotangent)
        return (out, *(operand.grad for operand in operands))

    return Work(both, outputs)
