"""The checksum list beside a sealed cache, in the format of `sha256sum`."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

LIST = "SHA256SUMS"


def file_sum(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_list(cache: Path) -> dict[str, str] | None:
    """Relative path -> SHA-256; None when the cache isn't sealed. Lines that are no entries are skipped."""
    path = cache / LIST
    if not path.is_file():
        return None
    lines = (line.partition("  ") for line in path.read_text(errors="replace").splitlines())
    return {name: digest for digest, _, name in lines if name and len(digest) == 64}


def list_problem(cache: Path) -> str | None:
    """What is wrong with the list itself, or None. Files that came after it (a job's own, without an overlay) needn't be in it."""
    sums = read_list(cache)
    if sums is None:
        return None
    path = cache / LIST
    lines = path.read_text(errors="replace").splitlines()
    if not sums or len(sums) != len(lines):
        return f"{len(lines) - len(sums)} of its {len(lines)} lines are no entries" if lines else "zero bytes"
    sealed = path.stat().st_mtime_ns
    missing = [
        name for name in listed_files(cache) if name not in sums and (cache / name).lstat().st_mtime_ns <= sealed
    ]
    return f"{len(missing)} files that were there when it was written are not in it" if missing else None


def write_list(cache: Path, sums: Mapping[str, str]) -> None:
    """Replace the list atomically."""
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    write_atomic(cache / LIST, text.encode())


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old or the new one, whatever happens; leaves no temporary file behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def listed_files(cache: Path) -> list[str]:
    """Relative paths of all files that belong into the list, sorted."""
    files = (Path(folder, name) for folder, _, names in os.walk(cache) for name in names)
    return sorted(str(f.relative_to(cache)) for f in files if f.name != LIST and f.suffix != ".lock")
