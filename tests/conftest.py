"""Eight CPU devices, strict dtype promotion, and shape checks inside the kernels."""

import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

with install_import_hook("neuronjax.kernels", "beartype.beartype"):
    import neuronjax  # noqa: F401


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The weights of SmolLM2-135M-Instruct, fetched as the command fetches them."""
    from neuronjax.models.hub import DownloadError, locate

    try:
        return locate("smollm2")
    except DownloadError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the tests that need the weights: {error}")
        pytest.skip(f"no network: {error}")
