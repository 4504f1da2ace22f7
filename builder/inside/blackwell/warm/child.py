"""Run one program under the null GPU with the recorder in it, bounded in time, and read back what was recorded."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blackwell.warm import choice, recorder

EXIT_GRACE = 30.0
"""Seconds that an interpreter gets to leave after its work: processes that used the null GPU can hang or abort while shutting down."""

KILL_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
OUTPUT_KEPT = 4000  # characters of a failed program's output
POLL = 0.2  # seconds

# x86-64-v3 (AVX2, FMA) is what ATEN_CPU_CAPABILITY=avx2 selects in Inductor, and what every host of a Blackwell card has.
BASELINE = {"x86_64": "x86-64-v3", "aarch64": "armv8.2-a"}


_running: "set[subprocess.Popen[bytes]]" = set()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one watched program ended and what it recorded."""

    argv: tuple[str, ...]
    card: str
    exit_code: int | None  # None: killed after its time
    finished: bool  # reached its end and no exception left it
    reported: bool = True  # at least one Python process of it told how it ended
    seconds: float
    output: str  # last part of stdout and stderr together
    kernels: tuple[Mapping[str, Any], ...] = ()  # `kernel` events
    choices: tuple[Mapping[str, Any], ...] = ()
    refused: tuple[str, ...] = ()
    graphs: Mapping[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """Triton kernels found in the cache."""
        return sum(1 for event in self.kernels if event["hit"])

    @property
    def misses(self) -> tuple[str, ...]:
        """Names of Triton kernels that had to be compiled."""
        return tuple(str(event["kernel"]) for event in self.kernels if not event["hit"])

    @property
    def graph_misses(self) -> int:
        """FX graphs and autograd graphs that had to be compiled."""
        return self.graphs.get("fx_miss", 0) + self.graphs.get("autograd_miss", 0)

    @property
    def graph_bypasses(self) -> int:
        """Graphs that can't be cached at all: torch compiles them in every process."""
        return self.graphs.get("fx_bypass", 0) + self.graphs.get("autograd_bypass", 0)

    @property
    def problem(self) -> str | None:
        """Why the program did not do its work, or None."""
        if self.refused:
            return f"asked for {', '.join(sorted(set(self.refused)))}, which can't be decided without a GPU"
        if self.exit_code is None and not self.finished:
            return "did not end in its time"
        if self.exit_code == 0 and not self.reported:
            return "ran no Python that could be watched (is it a Python program, started without -S, -I or -E?)"
        if not self.finished or (self.exit_code is not None and self.exit_code > 0):
            return f"failed with exit code {self.exit_code}"
        return None


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    card: str,
    timeout: float,
    limits: choice.Limits | None,
    threads: int = 1,
    directory: Path | None = None,
) -> Outcome:
    """Run `argv` in `environment` (see `nullgpu.environment` and `cache_environment`) with the recorder on.

    limits: choose statically, for a card with these; None: only watch. Never raises for what the program does.
    """
    with tempfile.TemporaryDirectory(prefix="blackwell-warm-") as temporary:
        events, log, tools = (Path(temporary) / name for name in ("events", "log", "bin"))
        events.mkdir()
        variables = {**environment, recorder.EVENTS: str(events), recorder.THREADS: str(threads)}
        variables["PYTHONPATH"] = _with_hook(variables.get("PYTHONPATH", ""))
        variables.pop(recorder.LIMITS, None)
        if limits is not None:
            variables[recorder.LIMITS] = json.dumps(vars(limits))
            baseline_compiler(tools, variables)
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_ends_with_us(), *argv],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
                start_new_session=True,
            )
            _running.add(process)
            try:
                code = _wait(process, events, started + timeout)
            finally:
                _running.discard(process)
                _kill(process)
        return _outcome(tuple(argv), card, code, time.monotonic() - started, log, events)


def _wait(process: "subprocess.Popen[bytes]", events: Path, deadline: float) -> int | None:
    """Exit code, or None when it had to be killed: past the deadline, or idle after its main process said that it is done."""
    main = events / f"{process.pid}.jsonl"
    ended: float | None = None
    while process.poll() is None:
        now = time.monotonic()
        if ended is None and main.exists() and b'"event": "end"' in main.read_bytes()[-100_000:]:
            ended = now
        if now > deadline or (ended is not None and now > ended + EXIT_GRACE):
            return None
        time.sleep(POLL)
    return process.returncode


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the program's own process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if number == signal.SIGTERM:
            try:
                process.wait(KILL_GRACE)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def _ends_with_us() -> list[str]:
    """Words in front of a program that let the kernel end it when we are killed and can't; util-linux has the command."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def stop_all() -> None:
    """End every program that other threads are watching, at once: they then see it as killed."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _outcome(argv: tuple[str, ...], card: str, code: int | None, seconds: float, log: Path, directory: Path) -> Outcome:
    events = [event for path in sorted(directory.glob("*.jsonl")) for event in read_events(path)]
    ends = [event for event in events if event["event"] == "end"]
    graphs: dict[str, int] = {}
    for event in ends:
        for name, count in event["graphs"].items():
            graphs[name] = graphs.get(name, 0) + count
    finished = bool(ends) and not any(event["failed"] for event in ends)
    return Outcome(
        argv=argv,
        card=card,
        exit_code=code,
        finished=finished,
        reported=bool(ends),
        seconds=seconds,
        output=log.read_text(errors="replace")[-OUTPUT_KEPT:],
        kernels=tuple(event for event in events if event["event"] == "kernel"),
        choices=tuple(event for event in events if event["event"] == "choice"),
        refused=tuple(event["what"] for event in events if event["event"] == "refused"),
        graphs=graphs,
    )


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of one process; a last line that was cut off by a kill is left out."""
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


def cache_environment(base: Mapping[str, str], cache: Path) -> dict[str, str]:
    """`base` with both caches at their fixed places in `cache`, and without the start-up hook's overlay over them."""
    variables = {
        name: value
        for name, value in base.items()
        if name not in ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TRITON_ALWAYS_COMPILE")
    }
    return {
        **variables,
        "BLACKWELL_CACHE": str(cache),
        "BLACKWELL_OVERLAY": "off",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        # So that a user's own autotuned kernels keep their choice on disk as FLA's do. The image sets it for jobs as well.
        "TRITON_CACHE_AUTOTUNING": "1",
        # Cubins without the stages they came from: a quarter of the size, less to read at every load, and not part of a key.
        "TRITON_STORE_BINARY_ONLY": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _with_hook(path: str) -> str:
    """PYTHONPATH with the recorder's start-up hook behind the null GPU's, and this package where no .pth file makes it known."""
    hook = str(Path(__file__).with_name("hook"))
    entries = [entry for entry in path.split(os.pathsep) if entry]
    at = next((index + 1 for index, entry in enumerate(entries) if entry.endswith("nullgpu_hook")), 0)
    entries.insert(at, hook)
    return os.pathsep.join(entries)


def baseline_compiler(directory: Path, variables: dict[str, str]) -> None:
    """Put a `g++` in front of PATH that builds for a baseline CPU where Inductor asks for this host's own (-march=native).

    Inductor keys a CPU kernel by its command line, in which the compiler is just "g++": job and build agree, and no kernel is baked that
    another host's CPU can't run. A CXX of the user's own is left alone, and then keys its entries for itself.
    """
    import platform

    machine = BASELINE.get(platform.machine())
    real = shutil.which("g++", path=variables.get("PATH"))
    if machine is None or real is None:
        return
    directory.mkdir()
    script = directory / "g++"
    script.write_text(
        "#!/bin/sh\n"
        f'for word in "$@"; do shift; [ "$word" = -march=native ] && word=-march={machine}; set -- "$@" "$word"; done\n'
        f'exec "{real}" "$@"\n'
    )
    script.chmod(0o755)
    variables["PATH"] = f"{directory}{os.pathsep}{variables.get('PATH', '')}"


def python_argv(words: Sequence[str]) -> list[str]:
    """A workload's words behind this interpreter."""
    return [sys.executable, *words]
