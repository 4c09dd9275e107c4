"""The settings of a training run, from a yaml file or from flags."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuronjax.tools.train.setting import check, kinds_of, read, setting

# A token is a byte of the text's UTF-8.
VOCAB = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that a run depends on; hashable.

    The fields are the keys of a yaml file and, with dashes, the flags of `neuronjax
    train`; `docs/training.md` lists them. A token is a byte of UTF-8.

    Raises:
        ValueError: a value is of the wrong type or out of its range, or two of them do
            not go together.

    Example:
        >>> TrainConfig(d_model=64, heads=2, data=2).devices
        2
        >>> TrainConfig(heads=3)
        Traceback (most recent call last):
            ...
        ValueError: TrainConfig: heads must divide d_model = 128, got 3
    """

    text: str | None = setting(None, "a text file; without one, Shakespeare's sonnets")
    out: str = setting("runs/train", "folder of checkpoints, log and loss curve")
    seed: int = setting(0, "of weights, data order and sampling", least=0)
    # The data.
    seq: int = setting(128, "tokens of a window", least=2)
    batch: int = setting(16, "windows a step", least=1)
    validation: float = setting(
        0.1, "share of the text's end that is only scored", least=0.0, most=0.9
    )
    # The model.
    d_model: int = setting(128, "width of the residual stream", least=2)
    d_ff: int = setting(384, "width of an MLP, or of one expert", least=1)
    layers: int = setting(4, "decoder layers", least=1)
    heads: int = setting(4, "query heads", least=1)
    kv_heads: int = setting(2, "key and value heads", least=1)
    experts: int = setting(0, "experts of a layer; 0 for a dense model", least=0)
    experts_per_token: int = setting(2, "experts that a token gets", least=1)
    shared_d_ff: int = setting(0, "width of an expert for all tokens, 0: none", least=0)
    balance: float = setting(0.01, "weight of the load-balance loss", least=0.0)
    dtype: str = setting(
        "float32",
        "of the arithmetic; weights are float32",
        one_of=("float32", "bfloat16"),
    )
    # The optimiser: AdamW, its rate warmed up and then let down along a cosine.
    steps: int = setting(300, "optimiser steps", least=1)
    learning_rate: float = setting(3e-3, "the highest rate of AdamW", least=0.0)
    warmup: int | None = setting(
        None, "steps until the rate is highest; a tenth of all, at most 20", least=0
    )
    weight_decay: float = setting(0.1, "of matrices, not of norms", least=0.0)
    clip: float = setting(1.0, "largest norm of a gradient", least=1e-12)
    # The mesh.
    data: int = setting(1, "devices that split the batch", least=1)
    tensor: int = setting(1, "devices that split heads, d_ff and vocabulary", least=1)
    expert: int = setting(1, "devices that split the experts", least=1)
    lnc: int = setting(1, "cores that split what a tensor rank has", one_of=(1, 2))
    # Checkpoints and samples.
    save_every: int = setting(50, "steps between checkpoints", least=1)
    keep: int = setting(2, "checkpoints that stay", least=1)
    prompt: str = setting("\n", "what the samples begin with")
    sample_tokens: int = setting(200, "tokens sampled at the end; 0: none", least=0)
    temperature: float = setting(
        0.8, "of the samples; 0 takes the likeliest", least=0.0
    )

    def __post_init__(self) -> None:
        kinds = kinds_of(type(self))
        try:
            for field in dataclasses.fields(self):
                value = read(field.name, getattr(self, field.name), *kinds[field.name])
                object.__setattr__(self, field.name, value)
                check(field, value)
            for holds, words in (*_of_model(self), *_of_mesh(self), *_of_prompt(self)):
                if not holds:
                    raise ValueError(words)
        except ValueError as error:
            raise ValueError(f"TrainConfig: {error}") from None

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.heads

    @property
    def warmup_steps(self) -> int:
        """Steps until the rate is highest."""
        return min(20, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh_sizes.values()) * self.lnc

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The mesh axes but `lnc`, for `make_mesh`."""
        return dict(data=self.data, tensor=self.tensor, expert=self.expert)


# What two settings must fulfil together, and the words when they do not.
Agreements = list[tuple[bool, str]]


def _of_model(c: TrainConfig) -> Agreements:
    return [
        (
            c.d_model % c.heads == 0,
            f"heads must divide d_model = {c.d_model}, got {c.heads}",
        ),
        (
            c.head_dim % 2 == 0,
            f"heads must leave each head an even width of d_model = {c.d_model}, since "
            f"the rotary embedding turns pairs, got {c.heads}",
        ),
        (
            c.heads % c.kv_heads == 0,
            f"kv_heads must divide heads = {c.heads}, got {c.kv_heads}",
        ),
        (
            not c.experts or c.experts_per_token <= c.experts,
            f"experts_per_token must be at most experts = {c.experts}, got "
            f"{c.experts_per_token}",
        ),
        (
            c.warmup_steps < c.steps,
            f"warmup must be less than steps = {c.steps}, got {c.warmup}",
        ),
    ]


def _of_mesh(c: TrainConfig) -> Agreements:
    ranks, rows = c.tensor * c.lnc, c.data * c.expert
    return [
        (
            c.batch % rows == 0,
            f"batch must be a multiple of data * expert = {rows}, got {c.batch}",
        ),
        (
            c.kv_heads % c.tensor == 0,
            f"tensor must divide kv_heads = {c.kv_heads}, got {c.tensor}",
        ),
        (
            VOCAB % c.tensor == 0,
            f"tensor must divide the {VOCAB} tokens, got {c.tensor}",
        ),
        (
            c.d_ff % ranks == 0,
            f"d_ff must be a multiple of tensor * lnc = {ranks}, got {c.d_ff}",
        ),
        (
            c.shared_d_ff % ranks == 0,
            f"shared_d_ff must be a multiple of tensor * lnc = {ranks}, got "
            f"{c.shared_d_ff}",
        ),
        (
            c.expert == 1 or (c.experts > 0 and c.experts % c.expert == 0),
            f"expert must divide experts = {c.experts}, got {c.expert}",
        ),
    ]


def _of_prompt(c: TrainConfig) -> Agreements:
    return [
        (bool(c.prompt), "prompt must not be empty"),
        (
            len(c.prompt.encode()) < c.seq,
            f"prompt must have fewer tokens than seq = {c.seq}, got "
            f"{len(c.prompt.encode())}",
        ),
    ]


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings that a yaml file names.

    Args:
        path: a file of `name: value` lines, the names those of `TrainConfig`.

    Returns:
        The values by name, not checked yet.

    Raises:
        ValueError: the file is no yaml, no mapping, or has a name that is no setting.
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        words = "settings in a file need PyYAML: pip install 'neuronjax[train]'"
        raise ImportError(words) from error
    path = Path(path)
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected yaml, got {error}") from None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{path}: expected lines of 'name: value', got {type(found).__name__}"
        )
    require_known(str(path), [str(name) for name in found])
    return dict(found)


def require_known(source: str, names: list[str]) -> None:
    """Refuses names that are no settings, with the nearest that is."""
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(f"{source}: {name} is no setting{hint}")
