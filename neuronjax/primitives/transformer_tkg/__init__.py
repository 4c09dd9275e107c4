"""The decode transformer: a composition of macros, layer by layer."""

from neuronjax.primitives.transformer_tkg.functions import (
    transformer_tkg as transformer_tkg,
)
