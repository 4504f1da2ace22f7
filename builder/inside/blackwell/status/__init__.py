"""How is the job doing? Verdict, last log lines, processes and GPUs, in bounded time; a missing part says why.

Exit code = verdict: 0 running, 10 finished, 11 stalled, 12 crashed, 13 unknown (nothing to judge by); 2 wrong usage.

  blackwell status --log train.log                    processes: those that hold the log open
  blackwell status --match 'train.py' --stall 120     log: what the matching processes write their output to
  docker exec JOB blackwell status --json
"""

import argparse
import contextlib
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blackwell.doctor import bounded, gpus
from blackwell.doctor.checks_gpu import START_WITH_GPUS
from blackwell.output import emit_json
from blackwell.status.joblog import LogTail, read_tail
from blackwell.status.processes import Process, find_processes, hidden_processes, output_file

HELP = "say how a running job is doing: verdict, last log lines, processes, GPUs"

EXIT_CODES = {"running": 0, "finished": 10, "stalled": 11, "crashed": 12, "unknown": 13}

PART_SECONDS = 4.0
"""Bound of each part; processes and GPUs are asked at once, the log after them."""

LOOK_AGAIN = 1.2
"""Seconds between two looks at a log that no process seems to hold: a job that opens it anew for each line moves it meanwhile."""

LINES = 20
"""Last log lines that are shown."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the answer, or why there is none."""

    value: Any = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The whole answer."""

    verdict: str
    reason: str
    log: Part = field(default_factory=Part)
    processes: Part = field(default_factory=Part)
    gpus: Part = field(default_factory=Part)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `blackwell status`."""
    parser.add_argument(
        "--log", metavar="FILE", help="the job's log; without it, the file that a matching process writes to"
    )
    parser.add_argument(
        "--match",
        type=_pattern,
        metavar="PATTERN",
        help="regular expression over command lines; without it, processes that hold the log open or have torch loaded",
    )
    parser.add_argument(
        "--stall",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="a log that didn't move for so long means stalled (default 300)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {problem}") from problem


def run(args: argparse.Namespace) -> int:
    """Ask, print, and return the verdict's exit code."""
    status = ask(Path(args.log) if args.log else None, args.match, args.stall)
    if args.json:
        emit_json(asdict(status))
    else:
        print(render(status))
    return EXIT_CODES[status.verdict]


def ask(log: Path | None, pattern: re.Pattern[str] | None, stall: float) -> Status:
    """Collect all parts within their bounds and judge."""
    children = [
        bounded.start(lambda report: report(find_processes(pattern, log))),
        bounded.start(gpus.look),
    ]
    found, cards = bounded.collect(children, [PART_SECONDS, PART_SECONDS])
    processes = _part(found)
    if log is None and processes.value:
        log = output_file(processes.value)
    if log is None:
        tail = Part(problem="no log given, and no matching process writes its output to a file")
    else:
        path = log
        tail = _part(bounded.run(lambda report: report(read_tail(path)), PART_SECONDS))
    verdict, reason = judge(tail.value, tail.problem, processes.value, processes.problem, stall)
    if verdict == "finished" and log is not None and tail.value is not None:
        verdict, reason = _look_again(log, tail.value, stall) or (verdict, reason)
    return Status(verdict=verdict, reason=reason, log=tail, processes=processes, gpus=_gpu_part(cards))


def _look_again(log: Path, tail: LogTail, stall: float) -> tuple[str, str] | None:
    """Another verdict than "finished", where no process that holds the log was seen and still there may be one; else None."""
    if tail.size == 0:
        return "unknown", "the log is empty and no process holds it: the job hasn't written yet, or writes elsewhere"
    if tail.age > stall:
        return None
    with contextlib.suppress(OSError):
        if hidden := hidden_processes(log.stat().st_uid):
            return "unknown", (
                f"no process that holds the log is to be seen, but {hidden} of its owner's can't be looked into by user {os.geteuid()}, "
                f"and the log moved {_span(tail.age)} ago: ask as the job's user, or with --match"
            )
        before = log.stat()
        time.sleep(LOOK_AGAIN)
        after = log.stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            return (
                "running",
                "the log moves, though no process that holds it is to be seen (it opens it anew for each line, or runs elsewhere)",
            )
    return None


def _part(outcome: bounded.Outcome) -> Part:
    if outcome.reports:
        return Part(value=outcome.reports[-1])
    return Part(problem=outcome.problem or "no answer")


def _gpu_part(outcome: bounded.Outcome) -> Part:
    report: gpus.GpuReport = outcome.reports[-1] if outcome.reports else gpus.GpuReport()
    found = report.by_nvml if report.by_nvml is not None else report.by_cuda
    if found:
        return Part(value=found)
    if report.driver is None and not outcome.problem:
        return Part(problem=f"no NVIDIA driver is visible here: {START_WITH_GPUS}")
    why = [f"{source}: {text}" for source, text in report.problems.items()] + (
        [outcome.problem] if outcome.problem else []
    )
    return Part(problem="no GPU seen" + (f" ({'; '.join(why)})" if why else ""))


def judge(
    log: LogTail | None, log_problem: str, processes: list[Process] | None, process_problem: str, stall: float
) -> tuple[str, str]:
    """Verdict and its reason, from what the parts say."""
    alive = [process for process in processes or () if process.state != "Z"]
    dead = [process for process in processes or () if process.state == "Z"]
    if alive:
        count = f"{len(alive)} process{'es' if len(alive) > 1 else ''}"
        if all(process.state in "Tt" for process in alive):
            return "stalled", f"{count}, all stopped by a signal or debugger"
        if log is None:
            return "running", f"{count}; whether it moves can't be judged: {log_problem}"
        if log.age > stall:
            why = f"{count}, but the log didn't move for {_span(log.age)}"
            return "stalled", f"{why}; it ends with {log.evidence}" if log.evidence and log.at_end else why
        return "running", f"{count}, log moved {_span(log.age)} ago" + (
            f"; it holds {log.evidence}" if log.evidence else ""
        )
    failed = [process for process in dead if process.exit_status]
    if failed:
        return "crashed", f"process {failed[0].pid} ended with {failed[0].exit_status} and waits for its parent"
    if log is not None and log.evidence and log.at_end:
        return "crashed", f"no process is left, and the log ends with {log.evidence}"
    if processes is None:
        return "unknown", f"the processes can't be seen: {process_problem}"
    if log is not None:
        return (
            "finished",
            "no process is left, and the log ends without an error; a job that was killed from outside looks the same",
        )
    if dead:
        return "finished", f"process {dead[0].pid} ended with 0 and waits for its parent"
    return "unknown", f"no process matches, and there is no log to judge by: {log_problem}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def render(status: Status) -> str:
    """The answer for a person."""
    lines = [f"{status.verdict}: {status.reason}", "", "processes:"]
    if status.processes.problem or not status.processes.value:
        lines.append(f"  {status.processes.problem or 'none matches'}")
    for process in status.processes.value or ():
        memory = f"{process.memory / 2**30:.1f} GiB" if process.memory is not None else "?"
        lines.append(
            f"  {process.pid} {process.state} cpu {process.cpu:.0f}% memory {memory} "
            f"for {_span(process.age)}: {process.command[:120]}"
        )
    lines += ["", "GPUs:"]
    lines += [f"  {status.gpus.problem}"] if status.gpus.problem else []
    for gpu in status.gpus.value or ():
        used = f"{gpu.memory_used / 2**30:.1f} of " if gpu.memory_used is not None else ""
        total = f"{gpu.memory_total / 2**30:.1f} GiB" if gpu.memory_total is not None else "memory unknown"
        busy = f", busy {gpu.utilization}%" if gpu.utilization is not None else ""
        lines.append(f"  {gpu.index} {gpu.name}: {used}{total}{busy}")
    log: LogTail | None = status.log.value
    if log is None:
        return "\n".join([*lines, "", f"log: {status.log.problem}"])
    lines += ["", f"log: {log.path}, {log.size} bytes, moved {_span(log.age)} ago"]
    if log.traceback:
        lines += ["traceback:", *(f"  {line}" for line in log.traceback), "last lines:"]
    return "\n".join([*lines, *(f"  {line}" for line in log.lines[-LINES:])])
