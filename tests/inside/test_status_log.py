"""Reading the end of a log: size, rubbish, progress bars, tracebacks of every shape."""

import os
import time
from pathlib import Path

import pytest
from blackwell.status.joblog import TAIL, clean, find_crash, read_tail

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
ValueError: bad batch"""


def test_huge_log_is_read_from_its_end_only(tmp_path: Path) -> None:
    log = tmp_path / "huge.log"
    with open(log, "wb") as file:
        file.truncate(50 << 30)  # sparse: 50 GiB of zeros
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast step 100\n" + TRACEBACK.encode() + b"\n")
    begin = time.monotonic()
    tail = read_tail(log)
    assert time.monotonic() - begin < 2
    assert tail.traceback == TRACEBACK.splitlines()
    assert tail.size > 50 << 30


def test_one_line_longer_than_the_window(tmp_path: Path) -> None:
    log = tmp_path / "line.log"
    log.write_bytes(b"x" * (TAIL + 1000))
    assert all(len(line) < 600 for line in read_tail(log).lines)


def test_progress_bar_is_folded_to_its_last_state() -> None:
    data = b"start\n" + b"".join(b"\r%3d%%|####" % n for n in range(101)) + b"\ndone\r\n"
    assert clean(data) == ["start", "100%|####", "done"]


def test_colours_and_binary_rubbish_are_dropped() -> None:
    assert clean(b"\x1b[31mred\x1b[0m \xff\xfe\x00bytes\x07\n\x00\x00\x01\n\n") == ["red bytes"]


def test_ranks_interleaved() -> None:
    lines = []
    first, second = ([f"[rank{rank}]: {line}" for line in TRACEBACK.splitlines()] for rank in (0, 1))
    for one, other in zip(first, second, strict=True):
        lines += [one, other]
    text, evidence, _ = find_crash(lines)
    assert text == TRACEBACK.splitlines()
    assert evidence == "ValueError: bad batch"


def test_the_cause_not_the_launchers_own_traceback() -> None:
    launcher = """Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/venv/lib/torch/distributed/run.py", line 900, in main
    run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============
train.py FAILED
------------
Root Cause (first observed failure):
  exitcode  : 1 (pid: 77)
============"""
    lines = ["step 1", *TRACEBACK.splitlines(), "E1201 launch.py: failed (exitcode: 1)", *launcher.splitlines()]
    text, evidence, position = find_crash(lines)
    assert text == TRACEBACK.splitlines()
    assert evidence == "ValueError: bad batch"
    assert position >= len(lines) - 3


def test_chained_exceptions_are_one() -> None:
    second = TRACEBACK.replace("ValueError: bad batch", "RuntimeError: step failed")
    words = "The above exception was the direct cause of the following exception:"
    text, evidence, _ = find_crash([*TRACEBACK.splitlines(), "", words, "", *second.splitlines()])
    assert text[0].startswith("Traceback") and "ValueError: bad batch" in text and words in text
    assert evidence == "RuntimeError: step failed"


def test_logger_prefix_before_the_first_line_only() -> None:
    lines = [
        "2026-12-01 10:00:00 ERROR Traceback (most recent call last):",
        *TRACEBACK.splitlines()[1:],
        "2026-12-01 bye",
    ]
    assert find_crash(lines)[0] == TRACEBACK.splitlines()


def test_two_tracebacks_the_last_counts() -> None:
    other = TRACEBACK.replace("bad batch", "worse batch").splitlines()
    assert find_crash([*TRACEBACK.splitlines(), "retrying", *other])[0] == other


@pytest.mark.parametrize(
    "line",
    [
        "Segmentation fault (core dumped)",
        "Killed",
        "Fatal Python error: Aborted",
        "CUDA error: an illegal memory access",
    ],
)
def test_crash_without_a_traceback(line: str) -> None:
    text, evidence, position = find_crash(["step 1", "step 2", line])
    assert (text, evidence, position) == ([], line, 2)


def test_words_that_only_look_like_a_crash() -> None:
    assert find_crash(["Killed 3 stale workers of an earlier run", "no error", "exitcode: 0"]) == ([], "", -1)


def test_cut_traceback_does_not_break(tmp_path: Path) -> None:
    log = tmp_path / "cut.log"
    log.write_text('Traceback (most recent call last):\n  File "train.py", line 3, in <mod')
    tail = read_tail(log)
    assert tail.at_end
    assert tail.traceback[0].startswith("Traceback")


def test_empty_log(tmp_path: Path) -> None:
    log = tmp_path / "empty.log"
    log.touch()
    tail = read_tail(log)
    assert (tail.lines, tail.traceback, tail.evidence, tail.at_end) == ([], [], "", False)
