"""A user's function as a macro: a NAME of its own, and all that a macro has."""

from neuronjax.primitives.user_kernel.register import (
    register_kernel as register_kernel,
)
