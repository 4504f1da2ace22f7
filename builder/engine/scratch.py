"""Directories for what is half-made, and files that appear whole or not at all.

Each directory is locked while its process lives. SIGKILL leaves it behind; the next command that works in the same place finds
it unlocked and removes it.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PREFIX = ".unfinished-"
NEW = ".new-"
IN_TMP = "blackwell-unfinished-"


@contextlib.contextmanager
def directory(where: Path | None = None) -> Iterator[Path]:
    """A new directory in `where` (made if need be; None: the system's temporary directory), gone afterwards."""
    prefix = PREFIX if where else IN_TMP
    where = where or Path(tempfile.gettempdir())
    where.mkdir(parents=True, exist_ok=True)
    _sweep(where, prefix)
    with _named(where):
        fresh = Path(tempfile.mkdtemp(dir=where, prefix=NEW))
        with held(fresh):  # it gets the name that is swept once it is locked
            path = fresh.with_name(prefix + fresh.name.removeprefix(NEW))
            try:
                yield fresh.rename(path)
            finally:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def held(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a directory or file, waiting for it if need be (`waiting` is told); it ends with the process."""
    file = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def is_held(path: Path) -> bool:
    """Does a living process hold the lock of this path?"""
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def write(path: Path, data: str | bytes) -> None:
    """Write a file, whole or not at all; directories above it are made."""
    write_all(path.parent, {path.name: data})


def write_all(where: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files (path below `where` -> content): none is put into its place before all are written."""
    with directory(where) as work:
        for number, data in enumerate(files.values()):
            (work / str(number)).write_bytes(data.encode() if isinstance(data, str) else data)
        for number, name in enumerate(files):
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (work / str(number)).replace(where / name)


@contextlib.contextmanager
def _named(where: Path) -> Iterator[None]:
    """Say where the disk was full: a failed write doesn't know its file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(where)) from error
        raise


def _sweep(where: Path, prefix: str) -> None:
    """Remove what killed processes left. Another user's is not ours to remove, nor is anything with a file system mounted in it."""
    for path in where.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if not is_held(path) and not _has_mounts(path):
                shutil.rmtree(path, ignore_errors=True)


def _has_mounts(path: Path) -> bool:
    """Is a file system mounted below? A killed bootstrap could leave /dev or /sys in its root."""
    mounts = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines())
    return any(m.startswith(f"{path.resolve()}/") for m in mounts)
