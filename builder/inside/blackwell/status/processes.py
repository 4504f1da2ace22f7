"""Find a job's processes in /proc, with the standard library alone."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

SAMPLE = 0.3
"""Seconds between the two looks from which the processor's use is computed."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process. CPU in percent of one core, resident memory in bytes, age in seconds.

    `exit_status` says how a zombie ended ("exit code 1", "SIGKILL"), empty otherwise and for exit code 0.
    """

    pid: int
    state: str
    command: str
    cpu: float
    memory: int | None
    age: float
    exit_status: str = ""
    output: str = ""
    """The regular file behind stdout or stderr, if any."""


def find_processes(pattern: re.Pattern[str] | None, log: Path | None) -> list[Process]:
    """Processes whose command line matches; without a pattern, those that hold `log` open; without both, those with
    torch loaded.

    This command's processes and its parents (a shell that holds the pattern in its command line) don't count.
    """
    own, ourselves = _ancestors(), _command(os.getpid())
    chosen = [pid for pid in _pids() if pid not in own and _command(pid) != ourselves and _wanted(pid, pattern, log)]
    before = {pid: _stat(pid) for pid in chosen}
    start = time.monotonic()
    if chosen:
        time.sleep(SAMPLE)
    elapsed = max(time.monotonic() - start, 1e-3)
    found = (_process(pid, before[pid], elapsed) for pid in chosen)
    return [process for process in found if process is not None]


def hidden_processes(owner: int) -> int:
    """How many processes of that user this one may not look into: any of them may hold a log open."""
    return sum(1 for pid in _pids() if _owner(pid) == owner and not _open_files_visible(pid))


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _open_files_visible(pid: int) -> bool:
    try:
        os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return False
    except OSError:  # it has just ended
        pass
    return True


def output_file(processes: list[Process]) -> Path | None:
    """The file that the first process with one writes its output to."""
    return next((Path(process.output) for process in processes if process.output), None)


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _ancestors() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    # In a container, process 1 is the job itself and also our ancestor when it started us: it stays a candidate.
    return pids - {1}


def _wanted(pid: int, pattern: re.Pattern[str] | None, log: Path | None) -> bool:
    if pattern is not None:
        return bool(pattern.search(_command(pid)))
    if log is not None:
        return _holds(pid, log)
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def _holds(pid: int, log: Path) -> bool:
    """Whether a process has the file open for writing."""
    try:
        wanted = os.path.realpath(log)
        for entry in os.scandir(f"/proc/{pid}/fd"):
            if os.readlink(entry.path) == wanted:
                flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text())
                if flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    except OSError:
        pass
    return False


def _command(pid: int) -> str:
    """The command line; of a zombie, which has none any more, its name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        text = b" ".join(words).decode(errors="replace").strip()
        return text or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on: 0 state, 1 parent, 11 and 12 ticks, 19 start, 21 pages, 49 exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _process(pid: int, before: list[str] | None, elapsed: float) -> Process | None:
    stat = _stat(pid)
    if stat is None or before is None:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    used = (int(stat[11]) + int(stat[12]) - int(before[11]) - int(before[12])) / ticks
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return Process(
        pid=pid,
        state=stat[0],
        command=_command(pid),
        cpu=100 * used / elapsed,
        memory=int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
        age=max(0.0, uptime - int(stat[19]) / ticks),
        exit_status=_exit_status(int(stat[49])) if stat[0] == "Z" else "",
        output=_output(pid),
    )


def _exit_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.WEXITSTATUS(status)
    return f"exit code {code}" if code else ""


def _output(pid: int) -> str:
    for descriptor in (1, 2):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        if os.path.isfile(target):
            return target
    return ""
