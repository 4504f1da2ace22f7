"""What this host has: cores, memory, disk; and the store of things that builds share."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from builder.engine import scratch
from builder.engine.places import of_user, variable
from builder.errors import BusyError, ResourceError

GB = 10**9
# The directories of the store. No room may keep things elsewhere: emptying the store removes these alone.
OURS = ("bases", "contents", "layers", "logs", "publish", "reports", "running", "test-tools", "tools", "verdicts", "wheels")  # fmt: skip
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
    named = variable("BUILDER_STORE")
    return Path(named).absolute() if named else of_user("XDG_CACHE_HOME", ".cache") / "blackwell-builder"


def empty_store() -> int:
    """Remove all that is ours in the store; returns the bytes freed. Anything else there stays: BUILDER_STORE may name any directory.

    Raises BusyError while a build is running, whose lock and half-made files lie there.
    """
    path = store()
    for lock in sorted((path / "running").glob("*")):
        if scratch.is_held(lock):
            raise BusyError(f"{lock.name} is being built, from this store", hint="wait for it, then empty the store")
    ours = [path / name for name in OURS if (path / name).is_dir()] + list(path.glob(f"{scratch.PREFIX}*"))
    size = 0
    for folder in ours:
        size += sum(f.lstat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
        shutil.rmtree(folder)
    return size


def resources(docker_root: Path) -> Resources:
    """Measure this host. Memory is what is available, or the control group's limit if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    memory = int(fields["MemAvailable"].split()[0]) * 1024
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path(limit).read_text(encoding="utf-8")))
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
    with (folder / name).open("a+", encoding="utf-8") as file:
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
