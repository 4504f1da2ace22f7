"""Run a function in a forked child with a time limit, so that a hung driver or file system can't hang the caller.

Forking costs milliseconds where a new interpreter costs a tenth of a second; it is safe because the caller imports only
standard modules and has one thread. A child that crashes, or can't even be killed, is an outcome like any other.
"""

import contextlib
import io
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Report = Callable[[Any], None]
"""Hands a picklable value to the parent, at once: what was reported before a crash is not lost."""

POLL = 0.005
"""Seconds between two looks at the children."""

KILL_GRACE = 0.3
"""Seconds a killed child may take to disappear; one in an uninterruptible wait never does and is left behind."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a child reported, printed, and how it ended (`problem` is empty when it ended well)."""

    reports: tuple[Any, ...]
    output: str
    problem: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Running:
    """A started child. Answers and output lie in anonymous memory files: no pipe to fill, no directory to write."""

    pid: int
    started: float
    answers: int
    output: int


def start(function: Callable[[Report], None]) -> Running:
    """Fork and run `function` in a process group of its own, with stdin empty and stdout and stderr kept."""
    answers, output = os.memfd_create("answers"), os.memfd_create("output")
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(function, answers, output)
    with contextlib.suppress(OSError):  # the child does it too; whoever is first wins
        os.setpgid(pid, pid)
    return Running(pid=pid, started=started, answers=answers, output=output)


def _child(function: Callable[[Report], None], answers: int, output: int) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # whatever the caller had put in their place
        function(lambda value: _write(answers, pickle.dumps(value)))
        code = 0
    except BaseException as problem:  # reported, whatever it is: the parent must be able to say why
        os.write(2, f"{type(problem).__name__}: {problem}\n".encode(errors="replace"))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def collect(children: Sequence[Running], seconds: Sequence[float]) -> list[Outcome]:
    """Wait for all children, each at most its own seconds, counted from its start. Never raises for a child."""
    status: dict[int, int | None] = {}
    ended_at: dict[int, float] = {}
    late: set[int] = set()
    try:
        while len(status) < len(children):
            for child, limit in zip(children, seconds, strict=True):
                if child.pid in status:
                    continue
                age = time.monotonic() - child.started
                ended, code = os.waitpid(child.pid, os.WNOHANG)
                if ended or age > limit + KILL_GRACE:
                    status[child.pid] = code if ended else None
                    ended_at[child.pid] = age
                elif age > limit and child.pid not in late:
                    late.add(child.pid)
                    _kill(child.pid)
            if len(status) < len(children):
                time.sleep(POLL)
    finally:
        for child in children:
            if child.pid not in status:  # only after an exception such as Ctrl-C
                _kill(child.pid)
    return [
        _outcome(child, status[child.pid], limit, child.pid in late, ended_at[child.pid])
        for child, limit in zip(children, seconds, strict=True)
    ]


def run(function: Callable[[Report], None], seconds: float) -> Outcome:
    """`start` and `collect` for one function."""
    return collect([start(function)], [seconds])[0]


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _outcome(child: Running, status: int | None, limit: float, late: bool, age: float) -> Outcome:
    output = _content(child.output).decode(errors="replace")
    if late:
        problem = f"no answer within {limit:.0f} s" if limit >= 1 else f"no answer within {limit:.1f} s"
        if status is None:
            problem += ", and it can't be killed (a hung device or file system)"
    elif status is None or os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name if status is not None else "an unknown cause"
        problem = f"died of {name}"
    elif os.WEXITSTATUS(status):
        problem = output.strip().splitlines()[-1] if output.strip() else f"exit code {os.WEXITSTATUS(status)}"
    else:
        problem = ""
    reports = tuple(_unpickle(_content(child.answers)))
    os.close(child.answers)
    os.close(child.output)
    return Outcome(reports=reports, output=output, problem=problem, seconds=round(age, 3))


def _content(descriptor: int) -> bytes:
    """All of a memory file; `pread`, because the child shares the file position."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0)


def _unpickle(data: bytes) -> list[Any]:
    stream, values = io.BytesIO(data), []
    while stream.tell() < len(data):
        try:
            values.append(pickle.load(stream))
        except Exception:  # the child was killed in the middle of a report
            break
    return values
