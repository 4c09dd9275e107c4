"""The experts of a decode step: the function, the macro and its rules."""

from neuronjax.primitives.expert_mlps.functions import moe_tkg as moe_tkg
