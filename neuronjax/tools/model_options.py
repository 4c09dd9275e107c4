"""What the commands that read a model are told about it."""

import enum
from typing import Annotated

import typer


class Dtype(enum.StrEnum):
    """Dtypes in which a model can be run."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str, typer.Argument(help="smollm2, a .gguf file, a folder, or a hub id (org/name)")
]
DtypeOption = Annotated[Dtype, typer.Option(help="dtype of weights and arithmetic")]
