"""Reading the two caches: which entries there are and what each one is warm for. Nothing is executed or unpickled."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackwell.kernels import elf

GROUP_PREFIX = "__grp__"
TRITON, INDUCTOR = "triton", "inductor"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled specialization in the Triton cache. Sizes in bytes; None where the cubin doesn't tell."""

    entry: str  # directory below the cache, "triton/KEY"
    name: str
    signature: tuple[str, ...]  # argument types of the lowered function; specialized-away arguments are not in it
    backend: str
    arch: int  # 10 * major + minor
    num_warps: int
    num_stages: int
    num_ctas: int
    cubin_bytes: int
    registers: int | None
    spills: int | None  # 4-byte words of local memory per thread, as Triton counts them
    shared_bytes: int

    @property
    def capability(self) -> str:
        """Compute capability of the GPU target, e.g. "12.0"."""
        return f"{self.arch // 10}.{self.arch % 10}"


@dataclass(frozen=True, kw_only=True)
class InductorEntry:
    """One file of the Inductor cache: kind is fxgraph, aotautograd, code, autotune or other."""

    entry: str  # path below the cache, "inductor/..."
    kind: str
    size: int


def triton_directories(cache: Path) -> list[Path]:
    """The entry directories of the Triton cache, sorted; empty when there is no such cache."""
    root = cache / TRITON
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def group_name(path: Path) -> str:
    """`__grp__NAME.json` -> NAME."""
    return path.name.removeprefix(GROUP_PREFIX).removesuffix(".json")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises OSError, or ValueError for anything else than one."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def signature_of(ttir: str, name: str) -> tuple[str, ...]:
    """Argument types of a function in Triton's IR: `(%x: !tt.ptr<f32> {...}, %n: i32)` -> ("*f32", "i32")."""
    start = ttir.find(f"@{name}(")
    if start < 0:
        return ()
    types, depth, position = [], 0, start + len(name) + 1
    argument = ""
    for character in ttir[position:]:
        depth += {"(": 1, "<": 1, "{": 1, ")": -1, ">": -1, "}": -1}.get(character, 0)
        if depth == 0 or (depth == 1 and character == ","):
            types.append(argument)
            argument = ""
            if depth == 0:
                break
        else:
            argument += character
    words = [t.split(":", 1)[1].split("{")[0].split(" loc(")[0].strip() for t in types if ":" in t]
    return tuple("*" + w[len("!tt.ptr<") :].split(">")[0] if w.startswith("!tt.ptr<") else w for w in words)


def kernel_of(cache: Path, group: Path) -> Kernel:
    """The kernel that a group file stands for. Raises OSError or ValueError when one of its files is damaged."""
    name = group_name(group)
    metadata = read_object(group.with_name(f"{name}.json"))
    content = group.with_name(f"{name}.cubin").read_bytes()
    try:
        use = elf.usage(elf.parse(content), str(metadata["name"]))
    except elf.ElfError as wrong:
        raise ValueError(str(wrong)) from wrong
    # Both hold the function's head; an image has no .ttir, which nothing reads at run time.
    ir = next((path for ending in ("ttir", "source") if (path := group.with_name(f"{name}.{ending}")).is_file()), None)
    target = metadata["target"]
    return Kernel(
        entry=str(group.parent.relative_to(cache)),
        name=str(metadata["name"]),
        signature=signature_of(ir.read_text(), str(metadata["name"])) if ir else (),
        backend=str(target["backend"]),
        arch=int(target["arch"]),
        num_warps=int(metadata["num_warps"]),
        num_stages=int(metadata["num_stages"]),
        num_ctas=int(metadata.get("num_ctas", 1)),
        cubin_bytes=len(content),
        registers=use.registers,
        spills=None if use.local_bytes is None else use.local_bytes // 4,
        shared_bytes=int(metadata["shared"]),
    )


def kernels(cache: Path) -> Iterator[Kernel]:
    """Every readable kernel of the cache; damaged ones are left to `verify`."""
    for directory in triton_directories(cache):
        for group in sorted(directory.glob(f"{GROUP_PREFIX}*.json")):
            try:
                yield kernel_of(cache, group)
            except (OSError, ValueError, KeyError, TypeError):
                continue


def inductor_kind(relative: Path) -> str:
    """What a file of the Inductor cache is, by its path below `inductor/`."""
    if relative.parts[0] in ("fxgraph", "aotautograd"):
        return relative.parts[0]
    if relative.suffix == ".best_config":
        return "autotune"
    return "code" if relative.suffix in (".py", ".so", ".cpp", ".h") else "other"


def inductor_files(cache: Path) -> Iterator[InductorEntry]:
    """Every file of the Inductor cache but lock files, sorted by path."""
    root = cache / INDUCTOR
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_file() and path.suffix != ".lock":
            relative = path.relative_to(root)
            yield InductorEntry(entry=f"{INDUCTOR}/{relative}", kind=inductor_kind(relative), size=path.stat().st_size)
