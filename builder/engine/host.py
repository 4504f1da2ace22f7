"""What this host has: cores, memory, disk; and the store of things that builds share."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from builder.errors import BusyError, ResourceError

GB = 10**9
# Upper figure that users report for one nvcc: https://github.com/Dao-AILab/flash-attention/issues/2079. Not measured by us.
MEMORY_PER_JOB = 5 * GB
# An estimate: an image's layers (5.3 GB, measured), as much again while they are made, and the uv cache.
DISK_PER_IMAGE = 18 * GB
MEMORY_PER_BUILD = 6 * GB


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Cores, memory (bytes) that a build may use, and free disk (bytes) where images lie."""

    cores: int
    memory: int
    disk: int

    @property
    def jobs(self) -> int:
        """Parallel compilers: one a core, and no more than memory holds."""
        return max(1, min(self.cores, self.memory // MEMORY_PER_JOB))


def store() -> Path:
    """Where compiled wheels, root file systems and measured sizes are kept: BUILDER_STORE, else the user's cache directory."""
    named = os.environ.get("BUILDER_STORE")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else cache / "blackwell-builder"


def empty_store() -> int:
    """Remove everything in the store; returns the bytes freed."""
    path = store()
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else 0
    shutil.rmtree(path, ignore_errors=True)
    return size


def resources(docker_root: Path) -> Resources:
    """Measure this host. Memory is what is available, or the control group's limit if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(fields["MemAvailable"].split()[0]) * 1024
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path(limit).read_text()))
    folder = docker_root if docker_root.is_dir() else Path("/")  # a remote engine's directory is not ours to measure
    return Resources(cores=len(os.sched_getaffinity(0)), memory=memory, disk=shutil.disk_usage(folder).free)


def check_resources(found: Resources) -> None:
    """Raise ResourceError, with the estimate, when a build can't fit."""
    if found.disk < DISK_PER_IMAGE:
        raise ResourceError(
            f"{found.disk / GB:.1f} GB of disk are free where Docker keeps images; a build needs about {DISK_PER_IMAGE / GB:.0f} GB",
            hint="free some with `docker image prune` and `docker builder prune`, or set `data-root` of Docker to a larger disk",
        )
    if found.memory < MEMORY_PER_BUILD:
        raise ResourceError(
            f"{found.memory / GB:.1f} GB of memory are available; a build needs about {MEMORY_PER_BUILD / GB:.0f} GB for one CUDA compiler",
            hint="stop something, or build on a larger machine",
        )


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock of one image's build. Raises BusyError at once if another process holds it; it ends with the process."""
    folder = store() / "running"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BusyError(
                f"{name} is being built by process {file.read().strip() or 'unknown'}",
                hint="wait for it: the same command ends at once when that build has succeeded",
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
