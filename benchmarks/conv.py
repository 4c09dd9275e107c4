"""Convolutions: all channels, Whisper's front end, and each channel alone."""

from collections.abc import Callable
from typing import Any

from benchmarks.workload import (
    Case,
    Side,
    Target,
    Work,
    Workload,
    as_list,
    jax_forward_backward,
    jax_work,
    slow_bfloat16,
    torch_work,
)

MODES = ("forward", "backward")


def _shape(batch, c_in, c_out, length, taps, padding, **more: Any) -> Case:
    shape = dict(batch=batch, c_in=c_in, c_out=c_out, length=length, taps=taps)
    return dict(shape, padding=padding, stride=1, dtype="float32") | more


_WHISPER = {
    f"whisper_{width}_conv{number}_{dtype}": _shape(
        *(1, channels, width, 1500, 3, (1, 1)), stride=stride, dtype=dtype, gelu=True
    )
    for mel, width in ((80, 384), (128, 1280))
    for number, (channels, stride) in enumerate(((mel, 1), (width, 2)), 1)
    for dtype in ("float32", "bfloat16")
}
_SHAPES = {
    "full": _shape(4, 64, 256, 4096, 5, (2, 2)),
    "depthwise": _shape(1, 1024, 1024, 4096, 4, (3, 0), depthwise=True),
    **_WHISPER,
}
CASES = {
    f"{name}_{mode}": dict(shape, mode=mode)
    for name, shape in _SHAPES.items()
    for mode in MODES
}


def _results(case: Case) -> int:
    room = case["length"] + sum(case["padding"]) - case["taps"]
    return room // case["stride"] + 1


def ideal(case: Case) -> dict[str, float]:
    """A product forward, two more backward; each array read or written once."""
    passes = 1 if case["mode"] == "forward" else 3
    size = 2 if case["dtype"] == "bfloat16" else 4
    fan_in = case["taps"] * (1 if case.get("depthwise") else case["c_in"])
    outs = case["batch"] * case["c_out"] * _results(case)
    ins = case["batch"] * case["c_in"] * case["length"]
    moved = outs + ins + fan_in * case["c_out"]
    return {
        "flops": 2.0 * outs * fan_in * passes,
        "bytes": float(size * passes * moved),
    }


def _inputs(case: Case) -> list[Any]:
    """Channels first: `x`, filters `[K, C_in, C_out]`, a bias, and the cotangent."""
    import numpy as np

    rng = np.random.default_rng(0)
    batch, c_in, c_out = case["batch"], case["c_in"], case["c_out"]
    fan_in = 1 if case.get("depthwise") else c_in
    shapes = [(batch, c_in, case["length"]), (case["taps"], fan_in, c_out)]
    shapes += [(c_out,)] if case.get("gelu") else []
    shapes += [(batch, c_out, _results(case))]
    drawn = [rng.standard_normal(s, dtype=np.float32) for s in shapes]
    drawn[1] *= np.float32((fan_in * case["taps"]) ** -0.5)
    return drawn


def _jax_side(make: Callable[[Case], Callable]) -> Callable[[Case], Work]:
    def build(case: Case) -> Work:
        import jax.numpy as jnp

        args = [jnp.asarray(x, case["dtype"]) for x in _inputs(case)]
        if case["mode"] == "backward":
            return jax_forward_backward(make(case), *args)
        return jax_work(make(case), *args[:-1])

    return build


def _lax(layout: str) -> Callable[[Case], Callable]:
    """XLA's convolution; channels last with the transposes that this takes."""

    def make(case: Case) -> Callable:
        import jax
        from jax import lax

        def block(x, w, *bias):
            last = layout == "NHC"
            out = lax.conv_general_dilated(
                x.swapaxes(1, 2) if last else x,
                w,
                (case["stride"],),
                [case["padding"]],
                dimension_numbers=(layout, "HIO", layout),
                feature_group_count=case["c_in"] if case.get("depthwise") else 1,
            )
            out = out.swapaxes(1, 2) if last else out
            if not bias:
                return out
            return jax.nn.gelu(out + bias[0][:, None], approximate=False)

        return block

    return make


def _neuronjax(form: str) -> Callable[[Case], Callable]:
    def make(case: Case) -> Callable:
        from neuronjax import emit

        moves = dict(stride=case["stride"], padding=case["padding"])

        def alone(x, w):
            filters = w.transpose(2, 1, 0)[:, :, None]
            out = emit.depthwise_conv1d_kernel(x[:, :, None], filters, **moves)
            return out[:, :, 0]

        def all_channels(x, w, *bias):
            act = "GELU" if bias else None
            return emit.conv1d_kernel(
                x, w, *bias, activation_fn=act, form=form, **moves
            )

        return alone if case.get("depthwise") else all_channels

    return make


def _torch(case: Case) -> Work:
    import torch
    from torch.nn import functional

    dtype = getattr(torch, case["dtype"])
    inputs = [torch.from_numpy(x).to(dtype) for x in _inputs(case)]
    inputs[1] = inputs[1].permute(2, 1, 0).contiguous()
    groups = case["c_in"] if case.get("depthwise") else 1

    def block(x, w, *bias):
        x = functional.pad(x, case["padding"])
        out = functional.conv1d(x, w, *bias, stride=case["stride"], groups=groups)
        return functional.gelu(out) if bias else out

    def outputs(found):
        first, *grads = as_list(found)
        if grads:
            grads[1] = grads[1].permute(2, 1, 0).contiguous()
        return [first, *grads]

    backward = case["mode"] == "backward"
    return torch_work(block, inputs, backward=backward, outputs=outputs)


def _not_depthwise(case: Case) -> str:
    return "a depthwise convolution has no plan" if case.get("depthwise") else ""


WORKLOAD = Workload(
    name="conv",
    title="Convolutions",
    cases=CASES,
    sides={
        "torch": Side(_torch, "torch", skip=slow_bfloat16),
        "lax": Side(_jax_side(_lax("NCH"))),
        "lax_channels_last": Side(_jax_side(_lax("NHC"))),
        "neuronjax": Side(_jax_side(_neuronjax("fast"))),
        "neuronjax_stacked": Side(
            _jax_side(_neuronjax("stacked")), skip=_not_depthwise
        ),
    },
    ideal=ideal,
    targets=(
        Target("neuronjax", "full_forward", "ms", 0.55, "torch"),
        Target("neuronjax", "full_backward", "ms", 0.85, "torch"),
        Target("neuronjax", "depthwise_forward", "ms", 0.55, "torch"),
        Target("neuronjax", "depthwise_backward", "ms", 0.9, "torch"),
    ),
)
