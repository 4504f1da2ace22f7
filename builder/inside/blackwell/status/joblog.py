"""The end of a job's log: last lines, the traceback found whole, signs of a crash. Bounded, whatever the log's size."""

import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

TAIL = 2 << 20
"""Bytes read from the end of the log."""

WIDTH = 500
"""Characters kept of one line."""

KEPT = 40
"""Last lines kept."""

AFTERMATH = 40
"""Lines that may follow a crash (a launcher's summary, other ranks' last words) without the job having gone on."""

INTERLEAVED = 64
"""Lines of other ranks that may stand between a traceback's first and second line."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]+")
_BEGIN = re.compile(r"^(?P<prefix>.*?)Traceback \(most recent call last\):\s*$")
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception|Caused by")
_LAUNCHER = re.compile(r"torch/distributed/(run|launcher|elastic)|ChildFailedError")
_FATAL = re.compile(
    r"Segmentation fault|core dumped|Fatal Python error|terminate called|Bus error|oom-kill|Out of memory: Kill"
    r"|CUDA error:|Watchdog caught collective operation timeout|ChildFailedError|exitcode\s*:\s*-?[1-9]"
    r"|\bSIG(KILL|SEGV|ABRT|BUS)\b|^Killed$|^Aborted( \(core dumped\))?$"
)


@dataclass(frozen=True, kw_only=True)
class LogTail:
    """The end of a log. `age` in seconds since it was last written, `evidence` a sign of a crash in one line."""

    path: str
    size: int
    age: float
    lines: list[str]
    traceback: list[str]
    evidence: str
    at_end: bool
    """Whether next to nothing follows the evidence: the job did not go on after it."""


def read_tail(path: Path) -> LogTail:
    """Read the last `TAIL` bytes. Raises OSError when that isn't possible, ValueError for other than regular files."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the log in it")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe must not wait for a writer
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path} is no regular file, so it can't be read without disturbing the job")
        start = max(0, facts.st_size - TAIL)
        file.seek(start)
        data = file.read(TAIL)
    lines = clean(data)
    if start and len(lines) > 1:
        lines = lines[1:]  # the first line is cut
    traceback, evidence, position = find_crash(lines)
    following = sum(1 for line in lines[position + 1 :] if line.strip()) if evidence else 0
    return LogTail(
        path=str(path),
        size=facts.st_size,
        age=max(0.0, time.time() - facts.st_mtime),
        lines=lines[-KEPT:],
        traceback=traceback,
        evidence=evidence,
        at_end=bool(evidence) and following <= AFTERMATH,
    )


def clean(data: bytes) -> list[str]:
    """Bytes of a log as lines: progress bars folded to their last state, colours and binary rubbish dropped."""
    lines = []
    for raw in data.decode(errors="replace").split("\n"):
        text = _ESCAPES.sub("", raw)
        states = [state for state in text.split("\r") if state.strip()]
        text = _CONTROLS.sub("", states[-1] if states else "").rstrip()
        lines.append(text if len(text) <= WIDTH else text[:WIDTH] + " ...")
    while lines and not lines[-1]:
        lines.pop()
    return lines


def find_crash(lines: list[str]) -> tuple[list[str], str, int]:
    """The traceback that tells the cause, one line of evidence, and the index of its last line (-1 without any).

    The cause is the last traceback that is not a launcher's own; a chain of exceptions counts as one.
    """
    tracebacks = _tracebacks(lines)
    own = [found for found in tracebacks if not _LAUNCHER.search("\n".join(found[1]))] or tracebacks
    fatal = [index for index, line in enumerate(lines) if _FATAL.search(line)]
    if own:
        end, text = own[-1]
        last = max([end, *(e for e, _ in tracebacks), *fatal])
        return text, text[-1].strip()[:WIDTH], last
    if fatal:
        return [], lines[fatal[-1]].strip()[:WIDTH], fatal[-1]
    return [], "", -1


def _tracebacks(lines: list[str]) -> list[tuple[int, list[str]]]:
    """Every traceback with the index of its last line, free of the prefix ("[rank3]: ") that launchers write."""
    found: list[tuple[int, list[str]]] = []
    index = 0
    while index < len(lines):
        begin = _BEGIN.match(lines[index])
        if begin is None:
            index += 1
            continue
        prefix = begin["prefix"]
        if not any(line.startswith(f"{prefix}  ") for line in lines[index + 1 : index + 1 + INTERLEAVED]):
            prefix = ""  # a logger's prefix stands before the first line only
        text, last = _one_traceback(lines, index, prefix)
        if found and _is_chained(lines, found[-1][0], index, prefix):
            between = [_strip(line, prefix) for line in lines[found[-1][0] + 1 : index]]
            found[-1] = (last, [*found[-1][1], *between, *text])
        else:
            found.append((last, text))
        # Other ranks' lines may stand between: go on after the first line, not after the last.
        index = last + 1 if not prefix else index + 1
    return found


def _one_traceback(lines: list[str], begin: int, prefix: str) -> tuple[list[str], int]:
    """From "Traceback" to the exception's own line and its continuation; only lines with the same prefix count."""
    text, last = ["Traceback (most recent call last):"], begin
    in_message = False
    for index in range(begin + 1, len(lines)):
        if not lines[index].startswith(prefix):
            continue
        line = _strip(lines[index], prefix)
        if in_message and (not line.strip() or line.startswith("Traceback") or not _continues(line)):
            break
        if not in_message and line and not line.startswith(" "):
            in_message = True
        text.append(line)
        last = index
    return text, last


def _continues(line: str) -> bool:
    """Whether a line after the exception's first belongs to its message: notes and details are usually indented."""
    return line.startswith(
        (" ", "\t", "For debugging", "Compile with", "CUDA kernel errors", "Search for", "Set TORCH", "Last error")
    )


def _strip(line: str, prefix: str) -> str:
    return line[len(prefix) :] if line.startswith(prefix) else line


def _is_chained(lines: list[str], end: int, begin: int, prefix: str) -> bool:
    between = [_strip(line, prefix) for line in lines[end + 1 : begin]]
    return len(between) <= 4 and any(_CHAIN.search(line) for line in between)
