"""The rules of router calls: what they read, and one row each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from neuronjax.primitives import contracts
from neuronjax.primitives.contracts import Contract, Size
from neuronjax.primitives.flags import only_flags
from neuronjax.primitives.hints import only_hints
from neuronjax.primitives.kinds import is_count
from neuronjax.primitives.options import (
    FLOATS,
    RouterActFnType,
    member,
    members,
    odd_dtype,
)
from neuronjax.primitives.tile import PARTITIONS, MemrefTile

PUBLIC, EMITTER = "router_topk", "router_topk_kernel"
ALL = (PUBLIC, EMITTER)
_FLOATS = ("x", "w", "w_bias", "selection_bias")
_HINTS = (
    "use_column_tiling",
    "use_indirect_dma_scatter",
    "use_PE_broadcast_w_bias",
    "shard_on_tokens",
)
_TILE_AXES = dict(w=0, w_bias=1, selection_bias=0, token_mask=0)


def public_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `router_topk`."""
    layouts = (call.x_hbm_layout, call.x_sb_layout)
    is_layout = all(map(is_count, layouts, (0, 0)))
    form = {0: "HT", 1: "TH"}.get(call.x_hbm_layout, "") if is_layout else ""
    shape = getattr(call.x, "shape", None) or ()
    facts = _facts(call, "TH" if len(shape) == 3 else form)
    if len(shape) == 3:
        facts["tokens"], facts["width"] = shape[1], PARTITIONS * shape[2]
        facts["on_chip"] = shape[0] != PARTITIONS or (
            call.x_sb_layout == 1 and shape[2] % 2 != 0
        )
    wanted = (call.logits_dtype, call.affinities_dtype)
    settings = (call.router_pre_norm, call.norm_topk_prob)
    bad = [str(d) for d in wanted if d is not None and not _floating(d)]
    return facts | dict(
        ranked=facts["ranked"] or (len(shape) == 3 and len(facts["w_shape"]) == 2),
        bad_output=", ".join(bad),
        settings=settings,
        is_layout=is_layout and layouts[0] in (0, 1) and layouts[1] in (0, 1, 2),
    )


def emitter_facts(call: SimpleNamespace) -> dict[str, Any]:
    """What the rules read of a call of `router_topk_kernel`."""
    return _facts(call, call.form) | dict(
        settings=(call.pre_norm, call.norm_topk), on_chip=False
    )


def _facts(call: SimpleNamespace, form: str) -> dict[str, Any]:
    given = {key: getattr(call, key) for key in (*_FLOATS, "token_mask")}
    shapes: dict[str, tuple[int, ...]] = {
        key: tuple(getattr(x, "shape", None) or ()) for key, x in given.items()
    }
    ranked = len(shapes["x"]) == len(shapes["w"]) == 2
    tokens, width = 0, 0
    if ranked:
        tokens, width = shapes["x"][::-1] if form == "HT" else shapes["x"]
    w_width, experts = shapes["w"] if len(shapes["w"]) == 2 else (0, 0)
    return dict(
        ranked=ranked,
        tiled=isinstance(call.x, MemrefTile),
        tokens=tokens,
        width=width,
        w_width=w_width,
        E=experts,
        on_chip=False,
        odd_dtype=odd_dtype({key: given[key] for key in _FLOATS}),
        x_dtype=getattr(call.x, "dtype", None),
        w_dtype=getattr(call.w, "dtype", None),
        unlike=_unlike(given, shapes, tokens, experts),
        off_axis=_off_axis(given, form),
        **{f"{key}_shape": shapes[key] for key in ("x", "w")},
    )


def _unlike(given, shapes, tokens, experts) -> str:
    """The first small operand of another shape or dtype than it must have."""
    wanted = dict(
        w_bias=("[1, E] or [E]", [(1, experts), (experts,)]),
        selection_bias=("[E]", [(experts,)]),
        token_mask=("[T]", [(tokens,)]),
    )
    for name, (words, fitting) in wanted.items():
        if given[name] is not None and shapes[name] not in fitting:
            return f"{name} must have shape {words}, {fitting[-1]}, got {shapes[name]}"
    mask = given["token_mask"]
    if mask is not None and mask.dtype != bool:
        return f"token_mask must be bool, True = keep, got {mask.dtype}"
    return ""


def _off_axis(given: dict[str, Any], form: str) -> str:
    axes = dict(_TILE_AXES, x=0 if form == "HT" else 1)
    for name, x in given.items():
        if isinstance(x, MemrefTile) and x.axis != axes[name]:
            return f"{name} axis = {axes[name]}, got {x.axis}"
    return ""


def _floating(dtype: Any) -> bool:
    try:
        return jnp.dtype(dtype) in FLOATS
    except TypeError:
        return False


def _arguments(tiles: bool = False, **changes: Any) -> Callable[[str], dict[str, Any]]:
    """Arguments that keep the rules but for `changes`; a tuple is a shape."""

    def build(function: str) -> dict[str, Any]:
        given: dict[str, Any] = dict(x=(4, 6), w=(6, 5), k=2, act_fn="SOFTMAX")
        if function == PUBLIC:
            given["x_hbm_layout"] = 1
        given |= changes
        axes = dict(_TILE_AXES, x=1)
        for key in axes:
            if type(given.get(key)) is tuple:
                given[key] = jnp.zeros(given[key])
            if tiles and key in given:
                given[key] = MemrefTile.from_tensor(given[key], axes[key])
        return given

    return build


def _row(rule: str, functions: tuple[str, ...], message: str, *args, **kwargs) -> None:
    """Enters a row; its stage is the second unless named."""
    stage = kwargs.pop("stage", 2)
    rule, text = f"router_topk.{rule}", "{function}: " + message
    contracts.add(Contract(rule, functions, text, *args, stage=stage, **kwargs))


def _tokens_misfit(c: SimpleNamespace) -> bool:
    return c.tokens > PARTITIONS and c.tokens % PARTITIONS != 0


contracts.add(
    only_hints(EMITTER, _arguments(), _HINTS),
    *only_flags(*ALL),
    contracts.all_or_none_tiles(
        EMITTER,
        (*_FLOATS, "token_mask"),
        lambda function: _arguments(w=MemrefTile.from_tensor(jnp.zeros((6, 5)), 0))(
            function
        ),
    ),
)
_row(
    "layout",
    (PUBLIC,),
    "x_hbm_layout must be 0 or 1 and x_sb_layout 0, 1 or 2, got {x_hbm_layout} and "
    "{x_sb_layout}",
    lambda c: not c.is_layout,
    example=_arguments(x_sb_layout=3),
    stage=1,
)
_row(
    "form",
    (EMITTER,),
    "form must be TH or HT, got {form}",
    lambda c: c.form not in ("TH", "HT"),
    example=_arguments(form="ET"),
    stage=1,
)
_row(
    "activation",
    ALL,
    f"act_fn must be one of {members(RouterActFnType)}, got {{act_fn}}",
    lambda c: member(RouterActFnType, c.act_fn) is None,
    example=_arguments(act_fn="RELU"),
    stage=1,
)
_row(
    "static",
    ALL,
    "k must be a Python integer, known while tracing, got {k}",
    lambda c: not isinstance(c.k, int | np.integer),
    example=_arguments(k=2.5),
    stage=1,
)
_row(
    "rank",
    ALL,
    "x must have shape [T, H] or [H, T] (of router_topk also [128, T, H/128]) and w "
    "[H, E], got {x_shape} and {w_shape}",
    lambda c: not c.ranked,
    example=_arguments(x=(6,)),
    stage=1,
)
_row(
    "dtype",
    ALL,
    "operands must be bfloat16, float16, float32 or float64, got {odd_dtype}",
    lambda c: c.odd_dtype,
    example=lambda function: _arguments(w=jnp.zeros((6, 5), jnp.int8))(function),
    stage=1,
)
_row(
    "output_dtype",
    (PUBLIC,),
    "logits_dtype and affinities_dtype must be bfloat16, float16, float32 or float64, "
    "got {bad_output}",
    lambda c: c.bad_output,
    example=_arguments(logits_dtype="int32"),
    stage=1,
)
_row(
    "tile_axis",
    (EMITTER,),
    "tiles must have {off_axis}",
    lambda c: c.off_axis,
    example=lambda function: (
        _arguments(tiles=True)(function)
        | dict(w=MemrefTile.from_tensor(jnp.zeros((6, 5)), 1))
    ),
    stage=1,
)
_row(
    "width",
    ALL,
    "x and w must have one H, got {width} in x of shape {x_shape} and {w_width} in w "
    "of shape {w_shape}",
    lambda c: c.width != c.w_width,
    example=_arguments(w=(7, 5)),
)
_row(
    "partitions",
    (PUBLIC,),
    "x of three axes must have shape [128, T, H/128], with x_sb_layout = 1 an even "
    "H/128, got {x_shape}",
    lambda c: c.on_chip,
    example=_arguments(x=(64, 4, 2), w=(256, 5)),
)
_row(
    "positive",
    ALL,
    "no axis of x but that of the tokens and none of w may be 0, got {x_shape} and "
    "{w_shape}",
    lambda c: 0 in (c.width, c.w_width) or 0 in c.w_shape,
    example=_arguments(x=(4, 0), w=(0, 5)),
)
_row(
    "one_dtype",
    ALL,
    "x and w must have one dtype, got {x_dtype} and {w_dtype}",
    lambda c: c.x_dtype != c.w_dtype,
    example=lambda function: _arguments(w=jnp.zeros((6, 5), jnp.bfloat16))(function),
)
_row(
    "small_operands",
    ALL,
    "{unlike}",
    lambda c: c.unlike,
    example=_arguments(w_bias=(4,)),
)
_row(
    "k",
    ALL,
    "k must lie between 1 and E = {E}, got {k}",
    lambda c: not 1 <= c.k <= c.E,
    example=_arguments(k=6),
)
_row(
    "norm",
    ALL,
    "norm_topk_prob needs router_pre_norm: the affinities of a softmax over the "
    "selected experts sum to 1 as they are, sigmoids of them are not normalized",
    lambda c: c.settings[1] and not c.settings[0],
    example=lambda function: _arguments(
        **(
            dict(router_pre_norm=False, norm_topk_prob=True)
            if function == PUBLIC
            else dict(pre_norm=False, norm_topk=True)
        )
    )(function),
)
_row(
    "tile_tokens",
    (EMITTER,),
    "tiles of the results lie on T: it must be at most 128 or a multiple, got {tokens}",
    lambda c: c.tiled and _tokens_misfit(c),
    example=_arguments(tiles=True, x=(129, 6)),
)
_row(
    "chip_width",
    ALL,
    "the chip takes H in multiples of 128 for x, got {x_shape}",
    size=Size("H", lambda c: c.width, multiple=PARTITIONS),
    example=_arguments(tiles=True),
    tag="hw",
    stage=3,
)
_row(
    "chip_experts",
    ALL,
    "the chip takes E up to 512 for w, got {w_shape}",
    size=Size("E", lambda c: c.E, maximum=512),
    example=_arguments(w=(6, 513)),
    tag="hw",
    stage=3,
)
_row(
    "chip_k",
    ALL,
    "the chip takes k up to 8, got {k}",
    size=Size("k", lambda c: c.k, maximum=8),
    example=_arguments(w=(6, 9), k=9),
    tag="hw",
    stage=3,
)
_row(
    "chip_sigmoid",
    (PUBLIC,),
    "the chip takes act_fn = SIGMOID without router_pre_norm only with "
    "use_indirect_dma_scatter",
    lambda c: (
        member(RouterActFnType, c.act_fn) is RouterActFnType.SIGMOID
        and not c.router_pre_norm
        and not c.use_indirect_dma_scatter
    ),
    example=_arguments(act_fn="SIGMOID", router_pre_norm=False),
    tag="hw",
    stage=3,
)
_row(
    "chip_scatter",
    (PUBLIC,),
    "the chip takes use_indirect_dma_scatter with T up to 128 or a multiple of it, got "
    "{tokens}",
    lambda c: c.use_indirect_dma_scatter and _tokens_misfit(c),
    example=_arguments(x=(129, 6), use_indirect_dma_scatter=True),
    tag="hw",
    stage=3,
)
_row(
    "chip_shards",
    (PUBLIC,),
    "the chip takes shard_on_tokens with an even T on its two cores, got {tokens}",
    lambda c: c.shard_on_tokens and c.tokens % 2 != 0,
    example=_arguments(x=(3, 6), shard_on_tokens=True),
    tag="hw",
    stage=3,
)
_row(
    "chip_eager",
    (PUBLIC,),
    "the chip takes return_eager_affi with T up to 128, got {tokens}",
    lambda c: c.return_eager_affi and c.tokens > PARTITIONS,
    example=_arguments(x=(129, 6), return_eager_affi=True),
    tag="hw",
    stage=3,
)
_row(
    "chip_logits",
    (PUBLIC,),
    "the chip's compiler takes skip_store_router_logits = False only",
    lambda c: c.skip_store_router_logits,
    example=_arguments(skip_store_router_logits=True),
    tag="hw",
    stage=3,
)
