"""Finding damage: what in a cache makes Triton or Inductor raise, recompile silently, or load rubbish.

Two layers. The checksum list beside a sealed cache finds every changed byte. Where there is none (a user's own cache,
an overlay, a warming that was killed) each kind of file is checked for what it must look like. What each kind of
damage does on each Triton was found by trying: tests/inside/test_kernels_damage.py.
"""

import ast
import base64
import hashlib
import json
import pickletools
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackwell.kernels import elf
from blackwell.kernels.entries import GROUP_PREFIX, INDUCTOR, TRITON, group_name, read_object, triton_directories
from blackwell.kernels.sums import LIST, file_sum, list_problem, read_list

TEXT_STAGES = ("source", "ttir", "ttgir", "llir", "ptx")
TMP = re.compile(r"^tmp\.pid_|^\.\d+\.\d+\.tmp$")
"""Left behind by a writer that was killed: Triton's directories, Inductor's files."""

MACHINES = {"x86_64": 62, "aarch64": 183}
RAISES, RECOMPILES, RUBBISH = "raises", "recompiles silently", "loads rubbish"
CRASHES, HARMLESS = "kills the process", "harmless"
UNNOTICED = "damage stays unnoticed"


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One damaged file. `entry` is what must go so that nothing bad is left: a file or a whole directory.

    Paths are relative to the cache. kind: empty, truncated, corrupt, missing, foreign, relocated, incomplete, leftover.
    effect: the worst that Triton or Inductor does with it.
    """

    path: str
    kind: str
    detail: str
    effect: str
    entry: str


def verify_cache(path: Path | str) -> list[Damage]:
    """Every damage in the cache directory that holds `triton/` and `inductor/`; empty when it is sound.

    Raises FileNotFoundError when there is no such directory.
    """
    cache = Path(path)
    if not cache.is_dir():
        raise FileNotFoundError(f"no kernel cache at {cache}: name its directory, or set BLACKWELL_CACHE")
    found = {damage.path: damage for damage in _against_list(cache)}
    for damage in _structural(cache):
        found.setdefault(damage.path, damage)
    return [found[key] for key in sorted(found)]


def _entry_of(relative: str) -> str:
    """What to remove for a damaged file: a Triton kernel's whole directory, one file otherwise."""
    parts = Path(relative).parts
    if parts[0] == TRITON and len(parts) > 2 and not relative.endswith(".autotune.json"):
        return "/".join(parts[:2])
    return relative


def _against_list(cache: Path) -> Iterator[Damage]:
    sums = read_list(cache)
    if problem := list_problem(cache):
        yield Damage(path=LIST, kind="corrupt", detail=problem, effect=UNNOTICED, entry=LIST)
    for relative, expected in (sums or {}).items():
        path = cache / relative
        entry = _entry_of(relative)
        if not path.is_file():
            detail, kind = f"listed in {LIST}, but not there", "missing"
        elif file_sum(path) == expected:
            continue
        elif path.stat().st_size == 0:
            detail, kind = "zero bytes", "empty"
        else:
            detail, kind = f"checksum differs from {LIST}", "corrupt"
        yield Damage(path=relative, kind=kind, detail=detail, effect=_effect(relative, kind), entry=entry)


def _effect(relative: str, kind: str) -> str:
    """The worst effect seen on any Triton from 3.6.0 to 3.9.0 (tests/inside/test_kernels_damage.py)."""
    name = Path(relative).name
    if relative.startswith(INDUCTOR + "/"):
        if kind == "missing":
            return RECOMPILES
        return RAISES if name.endswith(".py") else CRASHES if name.endswith(".so") else RECOMPILES
    if name.startswith(GROUP_PREFIX):
        return RECOMPILES if kind == "missing" else RAISES
    if name.endswith(".autotune.json"):
        return RECOMPILES if kind == "missing" else RAISES
    if name.endswith(".json"):
        return RECOMPILES if kind == "missing" else RAISES
    if name.endswith(".so"):
        return RECOMPILES if kind == "missing" else CRASHES
    if name.endswith(".cubin"):
        return RAISES if kind == "missing" else RUBBISH
    return RECOMPILES if kind == "missing" else RUBBISH


def _structural(cache: Path) -> Iterator[Damage]:
    for directory in triton_directories(cache):
        yield from _triton_entry(cache, directory)
    root = cache / INDUCTOR
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_file() or path.is_symlink():
            yield from _inductor_file(cache, path)


class _Wrong(Exception):
    """(kind, detail) of a file that is not as it must be."""


def _triton_entry(cache: Path, directory: Path) -> Iterator[Damage]:
    relative = str(directory.relative_to(cache))
    names = sorted(path.name for path in directory.iterdir())
    if TMP.match(directory.name) or not names:
        yield Damage(path=relative, kind="leftover", detail="of a killed writer", effect=HARMLESS, entry=relative)
        return
    grouped: set[str] = set()
    for name in names:
        path = directory / name
        if TMP.match(name):
            where = f"{relative}/{name}"
            yield Damage(path=where, kind="leftover", detail="of a killed writer", effect=HARMLESS, entry=where)
        elif name.startswith(GROUP_PREFIX) and name.endswith(".json"):
            grouped.add(group_name(path))
            yield from _group(cache, path)
        elif name.endswith(".autotune.json"):
            yield from _checked(cache, path, _check_autotune)
        elif name.endswith(".so"):
            yield from _checked(cache, path, _check_shared_object)
    ungrouped = [
        n for n in names if n.rpartition(".")[2] in ("cubin", *TEXT_STAGES) and n.rpartition(".")[0] not in grouped
    ]
    if ungrouped:
        yield Damage(
            path=f"{relative}/{ungrouped[0]}",
            kind="incomplete",
            detail="no group file beside it: its writer was killed, or the group file was lost",
            effect=RECOMPILES,
            entry=relative,
        )


def _checked(cache: Path, path: Path, check: Any, *arguments: Any) -> Iterator[Damage]:
    """Run one check on one file and turn what it raises into a Damage."""
    relative = str(path.relative_to(cache))
    try:
        check(path, *arguments)
    except _Wrong as wrong:
        kind, detail = wrong.args
    except elf.ElfError as wrong:
        kind, detail = (str(wrong) if str(wrong) in ("empty", "truncated") else "corrupt"), str(wrong)
    except FileNotFoundError:
        kind, detail = "missing", "not there"
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        empty = path.stat().st_size == 0
        kind, detail = ("empty", "zero bytes") if empty else ("corrupt", f"{type(wrong).__name__}: {wrong}")
    except OSError as wrong:
        kind, detail = "corrupt", f"unreadable: {wrong.strerror}"
    else:
        return
    yield Damage(path=relative, kind=kind, detail=detail, effect=_effect(relative, kind), entry=_entry_of(relative))


def _group(cache: Path, group: Path) -> Iterator[Damage]:
    """A group file and everything it names."""
    name = group_name(group)
    before = list(_checked(cache, group, _check_group))
    yield from before
    metadata: dict[str, Any] = {}

    def check_metadata(path: Path) -> None:
        metadata.update(_check_metadata(path))

    yield from _checked(cache, group.with_name(f"{name}.json"), check_metadata)
    yield from _checked(cache, group.with_name(f"{name}.cubin"), _check_cubin, metadata)
    listed = [] if before else [Path(p).name for p in read_object(group)["child_paths"].values()]
    for member in listed:
        if member.rpartition(".")[2] in TEXT_STAGES:
            yield from _checked(cache, group.with_name(member), _check_text)


def _check_group(group: Path) -> None:
    children = read_object(group)["child_paths"]
    if f"{group_name(group)}.json" not in children:
        raise _Wrong("corrupt", "does not name the kernel's metadata")
    here = group.with_name(f"{group_name(group)}.json").resolve().parent  # the baked entry, when this is an overlay
    for name, path in children.items():
        if Path(path).name != name:
            raise _Wrong("foreign", f"names {path} as {name}")
        if Path(path).resolve().parent != here:
            raise _Wrong("relocated", f"points to {Path(path).parent}; `blackwell kernels relocate` rewrites it")


def _check_metadata(path: Path) -> dict[str, Any]:
    metadata = read_object(path)
    own = base64.b32encode(bytes.fromhex(metadata["hash"])).decode().rstrip("=")
    if own != path.parent.name:
        raise _Wrong("foreign", f"belongs to entry {own}")
    for key in ("name", "shared", "num_warps", "num_stages"):
        metadata[key]
    metadata["target"]["arch"]
    return metadata


def _check_cubin(path: Path, metadata: dict[str, Any]) -> None:
    parsed = elf.parse(path.read_bytes())
    if parsed.machine != elf.EM_CUDA:
        raise _Wrong("foreign", "an ELF file, but not for a GPU")
    if not metadata:
        return  # the metadata's own damage is reported
    name, arch = metadata["name"], metadata["target"]["arch"]
    if name not in parsed.kernels():
        raise _Wrong("foreign", f"holds {', '.join(parsed.kernels()) or 'no kernel'}, not {name}")
    if parsed.gpu_arch() != arch:
        raise _Wrong("foreign", f"for sm_{parsed.gpu_arch()}, not sm_{arch}")
    threads = elf.usage(parsed, name).threads
    if threads is not None and threads < 32 * metadata["num_warps"]:
        raise _Wrong("foreign", f"for {threads} threads, not num_warps={metadata['num_warps']}")


def _check_text(path: Path) -> None:
    content = path.read_bytes()
    if not content:
        raise _Wrong("empty", "zero bytes")
    if b"\0" in content:
        raise _Wrong("corrupt", "NUL bytes in a text file")
    text = content.decode()
    if not text.endswith("\n") and not text.rstrip(" \t\r\0").endswith("}"):
        raise _Wrong("truncated", "ends in the middle of a line")
    if text.count("{") != text.count("}"):
        raise _Wrong("truncated", "braces are not closed")
    if path.suffix == ".ptx" and f".entry {path.stem}" not in text and len(path.stem) < 150:
        raise _Wrong("foreign", f"has no entry {path.stem}")
    if path.suffix in (".ttir", ".ttgir", ".source", ".llir") and f"@{path.stem}(" not in text and len(path.stem) < 150:
        raise _Wrong("foreign", f"has no function {path.stem}")


def _check_autotune(path: Path) -> None:
    content = read_object(path)
    if not content["configs_timings"]:
        raise _Wrong("corrupt", "no timings")
    for config, timings in content["configs_timings"]:
        numbers = timings if isinstance(timings, list) else [timings]
        if not isinstance(config["kwargs"], dict) or not all(isinstance(n, (int, float)) for n in numbers):
            raise _Wrong("corrupt", "not a list of configs with timings")


def _check_shared_object(path: Path) -> None:
    content = path.read_bytes()
    parsed = elf.parse(content)
    if parsed.machine != MACHINES.get(platform.machine(), parsed.machine):
        raise _Wrong("foreign", "for another CPU architecture")
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    if ".cpython-" in path.name:
        if not path.name.endswith(suffix):
            raise _Wrong("foreign", f"for another Python ({path.name})")
        if b"PyInit_" + path.name.removesuffix(suffix).encode() not in content:
            raise _Wrong("foreign", f"is not the module {path.name.removesuffix(suffix)}")


def inductor_hash(content: bytes) -> str:
    """How Inductor names a file after its content: 51 digits of the base32 SHA-256."""
    return base64.b32encode(hashlib.sha256(content).digest())[:51].decode().lower()


def _inductor_file(cache: Path, path: Path) -> Iterator[Damage]:
    relative = path.relative_to(cache)
    if TMP.match(path.name):
        where = str(relative)
        yield Damage(path=where, kind="leftover", detail="of a killed writer", effect=HARMLESS, entry=where)
    elif relative.parts[1] in ("fxgraph", "aotautograd"):
        yield from _checked(cache, path, _check_pickle)
    elif path.suffix == ".py" and re.fullmatch("c[a-z2-7]{51}", path.stem):
        yield from _checked(cache, path, _check_code)
    elif path.suffix == ".best_config":
        yield from _checked(cache, path, read_object)
    elif path.suffix == ".so":
        yield from _checked(cache, path, _check_shared_object)


def _check_pickle(path: Path) -> None:
    content = path.read_bytes()
    if not content:
        raise _Wrong("empty", "zero bytes")
    if re.fullmatch("[a-z2-7]{51}", path.name):
        if inductor_hash(content) != path.name:
            raise _Wrong("corrupt", "content differs from the hash in its name")
        return
    end = 0
    for opcode, _, position in pickletools.genops(content):
        end = (position or 0) + 1
        if opcode.name == "STOP":
            break
    if end != len(content):
        raise _Wrong("corrupt", "bytes after the end of the pickle")


def _check_code(path: Path) -> None:
    content = path.read_bytes()
    if not content:
        raise _Wrong("empty", "zero bytes")
    if path.stem in (f"c{inductor_hash(content.strip())}", f"c{inductor_hash(content)}"):
        return
    # A template's kernel (flex attention) is named after its code and settings that the file doesn't hold
    # (torch/_inductor/select_algorithm.py), so beside the list of checksums all that can be said is whether it is Python.
    try:
        ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise _Wrong("corrupt", f"is no Python: {error}") from error
    if not re.search(rb"^\s*def (call|triton_\w+)\(", content, flags=re.MULTILINE):
        raise _Wrong("corrupt", "holds no compiled graph and no kernel")


def to_json(damages: list[Damage]) -> str:
    """For logs: one compact line."""
    return json.dumps([damage.__dict__ for damage in damages])
