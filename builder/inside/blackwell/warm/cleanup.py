"""Leave in the caches only what a job can use: no locks, no leftovers of interrupted writes, no timings of kernels that never ran."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def remove_noise(cache: Path) -> list[str]:
    """Delete noise below `cache` and return what it was, relative to it. `*.autotune.json` and `*.best_config` stay: under `warm` they
    are static choices, not timings.
    """
    removed = []
    for path in sorted(_noise(cache)):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        removed.append(str(path.relative_to(cache)))
    for folder, directories, files in os.walk(cache, topdown=False):  # what became empty, bottom up
        if Path(folder) != cache and not files and not any((Path(folder) / name).exists() for name in directories):
            Path(folder).rmdir()
    for part in ("triton", "inductor"):
        (cache / part).mkdir(exist_ok=True)
    return removed


def _noise(cache: Path) -> Iterator[Path]:
    # Inductor's store of measured times: `pad_mm` and max-autotune put there what they timed.
    times = cache / "inductor" / "cache"
    if times.is_dir():
        yield times
    for folder, directories, files in os.walk(cache):
        here = Path(folder)
        if times in (here, *here.parents):
            continue
        for name in directories:
            if name == "locks" or name.startswith("tmp."):  # Inductor's locks; Triton's unfinished writes
                yield here / name
        for name in files:
            if here.name != "locks" and (name == "lock" or name.endswith((".lock", ".tmp")) or name.startswith(".")):
                yield here / name


def files(cache: Path) -> frozenset[str]:
    """Every file of both caches, relative to `cache`."""
    found: set[str] = set()
    for part in ("triton", "inductor"):
        for folder, _, names in os.walk(cache / part):
            found.update(str((Path(folder) / name).relative_to(cache)) for name in names)
    return frozenset(found)
