"""Changing a cache: taking damaged entries out, and making a copied cache true at its new place."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blackwell import source_keys
from blackwell.kernels import sums
from blackwell.kernels.damage import Damage, verify_cache
from blackwell.kernels.entries import GROUP_PREFIX, TRITON, read_object, triton_directories
from blackwell.kernels.sealing import KEYS


@dataclass(frozen=True, kw_only=True)
class Removed:
    """An entry that was taken out. `recompiles` says in words what the next run makes anew; empty for leftovers."""

    entry: str
    reasons: tuple[str, ...]
    recompiles: str


def what_recompiles(cache: Path, entry: str, damaged: Sequence[str] = ()) -> str:
    """What the next run must make when `entry` is gone, in words; `damaged` names files of it that may be gone."""
    path = cache / entry
    if entry == sums.LIST:
        return "nothing (the checksum list is made anew of the files as they are)"
    if entry == source_keys.FILE:
        return "nothing (without it each process hashes Triton's and torch's files; `blackwell warm` makes it)"
    if entry.startswith(TRITON + "/"):
        names = sorted({*([p.name for p in path.iterdir()] if path.is_dir() else [path.name]), *damaged})
        for name in names:
            if name.startswith(GROUP_PREFIX) or name.endswith(".cubin"):
                return f"kernel {name.removeprefix(GROUP_PREFIX).rpartition('.')[0]}"
        for name in names:
            if name.endswith(".autotune.json"):
                return f"autotuning of {name.removesuffix('.autotune.json')} (a benchmark, no compile)"
            if name.endswith(".so"):
                return f"C module {name.partition('.')[0]} (needs a C compiler)"
        return f"entry {path.name}"
    kind = Path(entry).parts[1] if len(Path(entry).parts) > 1 else ""
    if kind in ("fxgraph", "aotautograd"):
        return f"Inductor graph {Path(entry).parent.name[:12]} ({kind})"
    if entry.endswith(".best_config"):
        return "autotuning of an Inductor kernel (a benchmark, no compile)"
    return f"Inductor code {path.name}"


def repair(cache: Path, damages: Sequence[Damage] | None = None) -> list[Removed]:
    """Remove the damaged entries and nothing else, and drop them from the checksum list.

    An entry leaves by one rename, so a running job sees it whole or not at all; where the file system refuses that, file by file, the
    one that makes Triton see an entry first. Raises PermissionError when the cache
    can't be written, before anything was changed.
    """
    damages = verify_cache(cache) if damages is None else damages
    by_entry: dict[str, list[Damage]] = {}
    for damage in damages:
        by_entry.setdefault(damage.entry, []).append(damage)
    if not by_entry:
        return []
    trash = cache / f".trash.{os.getpid()}"
    trash.mkdir()
    removed = []
    try:
        for number, (entry, found) in enumerate(sorted(by_entry.items())):
            leftover = all(damage.kind == "leftover" for damage in found)
            words = "" if leftover else what_recompiles(cache, entry, [Path(d.path).name for d in found])
            with contextlib.suppress(FileNotFoundError):  # the file was missing: only its line in the list goes
                _take_out(cache / entry, trash / str(number))
                _drop_empty_parents(cache, entry)
            reasons = tuple(f"{damage.path}: {damage.kind} ({damage.detail})" for damage in found)
            removed.append(Removed(entry=entry, reasons=reasons, recompiles=words))
    finally:
        shutil.rmtree(trash, ignore_errors=True)
        gone = {item.entry for item in removed}
        listed = sums.read_list(cache)
        if sums.LIST in gone:
            sums.write_list(cache, {name: sums.file_sum(cache / name) for name in sums.listed_files(cache)})
        elif listed is not None:
            kept = {n: s for n, s in listed.items() if n not in gone and not any(n.startswith(f"{g}/") for g in gone)}
            sums.write_list(cache, kept)
    return removed


def _take_out(path: Path, trash: Path) -> None:
    """Move a file or directory into the trash. Raises OSError."""
    try:
        path.rename(trash)
    except OSError as refused:
        # In a container the baked cache is a lower layer, and overlayfs renames no directory of one (unless made with redirect_dir).
        if refused.errno != errno.EXDEV or not path.is_dir():
            raise
        trash.mkdir()
        for file in sorted(path.iterdir(), key=lambda p: (not p.name.startswith(GROUP_PREFIX), p.name)):
            _take_out(file, trash / file.name)
        path.rmdir()


def _drop_empty_parents(cache: Path, entry: str) -> None:
    """Remove the directories that a removed entry leaves empty, but not `triton/` and `inductor/`."""
    for parent in list(Path(entry).parents)[:-2]:
        try:
            (cache / parent).rmdir()
        except OSError:
            return


def relocate(cache: Path, old: str, new: str) -> list[str]:
    """Rewrite the absolute paths of a cache that was built at `old` and now lies at `new`; returns the files changed.

    Only group files matter: Inductor's entries hold paths as well, but only in comments and debug lines. Every file is
    replaced atomically, its line in the checksum list only when its old content was as listed, and running it again
    finishes what an interrupted run began. Raises ValueError for a relative path.
    """
    if not (Path(old).is_absolute() and Path(new).is_absolute()):
        raise ValueError(f"relocate needs two absolute paths, not {old!r} and {new!r}")
    old, new = os.path.normpath(old), os.path.normpath(new)
    listed = sums.read_list(cache)
    changed = []
    for directory in triton_directories(cache):
        for group in sorted(directory.glob(f"{GROUP_PREFIX}*.json")):
            content = group.read_bytes()
            try:
                children = json.loads(content)["child_paths"]
                moved = {name: _moved(path, old, new) for name, path in children.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # damaged: for `repair`
            if moved == children:
                continue
            relative = str(group.relative_to(cache))
            sound = listed is not None and listed.get(relative) == sums.file_sum(group)
            sums.write_atomic(group, json.dumps({"child_paths": moved}).encode())
            if listed is not None and sound:
                listed[relative] = sums.file_sum(group)
            changed.append(relative)
    sound = listed is not None and (cache / KEYS).is_file() and listed.get(KEYS) == sums.file_sum(cache / KEYS)
    if _relocate_keys(cache, old, new):
        changed.append(KEYS)
        if listed is not None and sound:
            listed[KEYS] = sums.file_sum(cache / KEYS)
    if changed and listed is not None:
        sums.write_list(cache, listed)
    return changed


def _relocate_keys(cache: Path, old: str, new: str) -> bool:
    """Let keys.json name the new place, which `explain` compares; False when there is nothing to change in it."""
    try:
        keys = read_object(cache / KEYS)
    except (OSError, ValueError):
        return False
    if old == new or keys.get("path") != old:
        return False
    sums.write_atomic(cache / KEYS, json.dumps({**keys, "path": new}, indent=1, sort_keys=True).encode())
    return True


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + "/") else path
