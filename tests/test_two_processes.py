"""One process with four devices and two with two each compute the same."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 400


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory):
    """What `tests.two_processes` wrote: as one process, as two."""
    folder = tmp_path_factory.mktemp("processes")
    found = []
    for count in (1, 2):
        out = folder / f"{count}.npz"
        _run(out, count)
        with np.load(out) as stored:
            found.append(dict(stored))
    return found


def _run(out: Path, count: int) -> None:
    """Runs the program as `count` processes that share four devices."""
    shared = ["--devices", str(4 // count), "--processes", str(count)]
    shared += ["--coordinator", f"localhost:{_free_port()}"]
    command = [sys.executable, "-m", "tests.two_processes", str(out), *shared]
    logs = [out.with_suffix(f".{i}.log") for i in range(count)]
    started = []
    try:
        for i, log in enumerate(logs):
            with open(log, "w") as said:
                started.append(
                    subprocess.Popen(
                        [*command, "--process", str(i)],
                        cwd=ROOT,
                        env=dict(os.environ, PYTHONUNBUFFERED="1"),
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [process.wait(TIMEOUT) for process in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"not done after {TIMEOUT} s\n{_told(logs)}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(codes), f"exit codes {codes}\n{_told(logs)}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def _told(logs: list[Path]) -> str:
    return "\n".join(f"== process {i}\n{p.read_text()}" for i, p in enumerate(logs))


def test_two_processes_share_four_devices(one_and_two):
    one, two = one_and_two
    assert one["devices"].tolist() == [4, 4]
    assert two["devices"].tolist() == [4, 2]


def test_a_train_step_over_data_and_tensor_is_the_same(one_and_two):
    one, two = one_and_two
    assert one.keys() == two.keys()
    losses = one["losses"]
    assert np.all(np.diff(losses) < 0), losses
    for name in one:
        if name == "losses" or name.startswith("weight"):
            np.testing.assert_allclose(two[name], one[name], rtol=1e-6, atol=1e-6)


def test_a_ring_is_the_same_bit_for_bit(one_and_two):
    """Blocks and sums travel from neighbour to neighbour, in one order everywhere."""
    one, two = one_and_two
    names = [name for name in one if name.startswith("ring divided")]
    assert len(names) == 6
    for name in names:
        np.testing.assert_array_equal(two[name], one[name], err_msg=name)


def test_a_ring_with_a_whole_factor_is_the_same(one_and_two):
    """Its gradient is one all-reduce over all ranks, whose order is the backend's."""
    one, two = one_and_two
    names = [name for name in one if name.startswith("ring whole")]
    assert len(names) == 6
    for name in names:
        np.testing.assert_allclose(two[name], one[name], 1e-6, 1e-6, err_msg=name)


def test_ranks_on_several_processes_generate_the_same(one_and_two):
    one, two = one_and_two
    for name in ("tokens 4 1", "tokens 2 2"):
        assert one[name].shape == (2, 5)
        np.testing.assert_array_equal(two[name], one[name], err_msg=name)
