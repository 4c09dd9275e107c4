"""Eight CPU devices, strict dtype promotion, and shape checks inside the kernels."""

import gc
import itertools
import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

with install_import_hook("neuronjax.kernels", "beartype.beartype"):
    import neuronjax  # noqa: F401

_run = itertools.count(1)
_TABLE = "test_transformations.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--table-every 4` runs every fourth cell of the transformation table.

    A row has 32 cells, so with an odd number, or a few rows, each column is met.
    """
    parser.addoption("--table-every", type=int, default=1, metavar="N")


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """Leaves out the cells that `--table-every` skips."""
    every = int(config.getoption("--table-every") or 1)
    cells = [item for item in items if item.path.name == _TABLE]
    skipped = {item for i, item in enumerate(cells) if i % every}
    if skipped:
        config.hook.pytest_deselected(items=list(skipped))
        items[:] = [item for item in items if item not in skipped]


def pytest_collection_finish() -> None:
    """Python looks for cycles seldom, and never in what is imported and collected.

    Tracing makes many small objects that live on; going through them all, again and
    again, took a tenth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture(autouse=True)
def _few_programs_at_once():
    """Lets go of programs: each holds memory maps, of which a process has 65530."""
    yield
    if next(_run) % 200 == 0:
        jax.clear_caches()


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
