"""The windows of a training run: every byte is learnt, in an order that resumes."""

import re

import numpy as np
import pytest

from neuronjax.tools.train.config import TrainConfig
from neuronjax.tools.train.curve import save_curve, terminal_curve
from neuronjax.tools.train.log import Log, Record, read_log
from neuronjax.tools.train.sample import shown
from neuronjax.tools.train.windows import Text, Windows, demo_text, scored_windows

TOKENS = np.arange(101, dtype=np.uint8)


def windows(position=0, seed=0):
    return Windows(TOKENS, seq=8, batch=3, seed=seed, position=position)


def test_the_demo_text_is_all_of_the_sonnets():
    text = demo_text()
    numbers = re.findall(r"(?m)^[IVXLC]+$", text)
    assert len(numbers) == len(set(numbers)) == 154
    assert numbers[0] == "I" and numbers[-1] == "CLIV"
    poems = re.split(r"(?m)^[IVXLC]+$", text)[1:]
    lines = {i: sum(map(bool, p.split("\n"))) for i, p in enumerate(poems, 1)}
    # The edition of 1609: sonnet 99 has a line more, sonnet 126 two less.
    assert {i: n for i, n in lines.items() if n != 14} == {99: 15, 126: 12}
    assert 30_000 < len(text) < 100_000
    assert "Shall I compare thee to a summer's day?" in text


def test_a_window_is_one_piece_of_the_text():
    for batch, _ in zip(windows(), range(9), strict=False):
        assert batch.shape == (3, 9) and batch.dtype == np.int32
        np.testing.assert_array_equal(np.diff(batch), 1)


@pytest.mark.parametrize("position", [3, 6, 12, 33])
def test_the_order_goes_on_from_any_position(position):
    one = windows()
    taken = [next(one) for _ in range(20)]
    other = windows(position)
    for batch in taken[position // 3 :]:
        np.testing.assert_array_equal(next(other), batch)
    assert other.position == one.position


def test_a_pass_takes_each_window_once_and_the_next_takes_others():
    one = Windows(TOKENS, seq=8, batch=11, seed=0)
    first, second = next(one)[:, 0], next(one)[:, 0]
    for starts in (first, second):
        assert len(set(starts)) == 11 and len(set(starts % 8)) == 1
    assert not np.array_equal(first, second)


def test_the_seed_chooses_the_order():
    assert not np.array_equal(next(windows()), next(windows(seed=1)))


def test_scored_windows_lie_side_by_side_and_fill_up():
    batches = scored_windows(TOKENS, seq=8, batch=5)
    rows = np.concatenate([rows[counts == 1] for rows, counts in batches])
    np.testing.assert_array_equal(rows[:, 0], np.arange(0, 96, 8))
    assert [len(rows) for rows, _ in batches] == [5, 5, 5]
    assert sum(counts.sum() for _, counts in batches) == 12
    assert scored_windows(TOKENS[:8], seq=8, batch=5) == []
    assert len(scored_windows(TOKENS, seq=2, batch=2, most=3)) == 3


def test_the_end_of_the_text_is_kept_aside(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(TOKENS.tobytes())
    text = Text(TrainConfig(text=str(file), seq=8, validation=0.2, prompt="a"))
    np.testing.assert_array_equal(text.train, TOKENS[:81])
    np.testing.assert_array_equal(text.validation, TOKENS[81:])
    other = Text(TrainConfig(text=str(file), seq=8, validation=0.0, prompt="a"))
    assert other.validation.size == 0 and other.digest == text.digest


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            dict(seq=60, validation=0.0),
            "at least 2 * seq = 120 bytes to learn, got 101",
        ),
        (
            dict(seq=16, validation=0.1),
            "leave more than seq = 16 bytes to score, got 10",
        ),
    ],
)
def test_a_short_text_is_refused(tmp_path, sizes, words):
    file = tmp_path / "text.txt"
    file.write_bytes(TOKENS.tobytes())
    with pytest.raises(ValueError, match="text.txt: ") as error:
        Text(TrainConfig(text=str(file), **sizes))
    assert words in str(error.value)


def records(count):
    return [Record(i + 1, 5.0 - i, 1.0, 0.0, 10.0) for i in range(count)]


def test_a_log_is_cut_back_to_the_checkpoint(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    for record in records(4):
        log.add(record)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert read_log(tmp_path / "log.jsonl") == records(4)
    again = Log(tmp_path / "log.jsonl", upto=2)
    again.add(records(3)[-1])
    assert again.records == read_log(tmp_path / "log.jsonl") == records(3)


def test_a_curve_falls_from_top_to_bottom(tmp_path):
    lines = terminal_curve([8.0 - i / 16 for i in range(128)], width=16, height=4)
    assert len(lines) == 4
    assert lines[0].startswith("7.78 ┤█") and lines[-1].startswith("0.28 ┤██")
    filled = [line.count("█") for line in lines]
    assert filled == sorted(filled)
    assert terminal_curve([]) == [] and len(terminal_curve([1.0, 1.0])) == 8
    save_curve(records(3), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_samples_show_what_a_terminal_would_not():
    assert shown("a\nb\x1b[31m\ufffdé\r") == "a\nb·[31m·é·"
