"""Build the null GPU's libraries for one torch: `python build.py --site SITE_PACKAGES --out DIR`.

Needs gcc and Python's standard library. The NVIDIA wheels that torch brought into SITE_PACKAGES give the CUDA headers, the sonames, and the
names and symbol versions that each real library exports; everything not written in C here is generated from those.
"""

import argparse
import fnmatch
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


class BuildError(Exception):
    """What is missing or wrong, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """One stand-in: its C source, how a generated function refuses, and the real library it stands in for."""

    key: str  # the section of allowed.toml
    sources: tuple[str, ...]
    refuse: int  # status of a function that the null GPU does not implement
    pattern: str  # the real library below SITE_PACKAGES/nvidia


LIBRARIES = (
    Library(
        key="libcuda", sources=("card.c", "memory.c", "cubin.c", "driver.c"), refuse=801, pattern=""
    ),  # part of the NVIDIA driver
    Library(key="libcudart", sources=("runtime.c",), refuse=801, pattern="*/lib/libcudart.so.[0-9]*"),
    Library(key="libcublasLt", sources=("cublaslt.c",), refuse=15, pattern="*/lib/libcublasLt.so.[0-9]*"),
    Library(key="libcublas", sources=("cublas.c",), refuse=15, pattern="*/lib/libcublas.so.[0-9]*"),
    Library(key="libcudnn", sources=("cudnn.c",), refuse=3000, pattern="cudnn/lib/libcudnn.so.[0-9]*"),
    Library(key="libnccl", sources=("nccl.c",), refuse=5, pattern="nccl/lib/libnccl.so.[0-9]*"),
)


# cuda_fp16.h and cuda_fp8.h want <nv/target> of a wheel that torch doesn't need. It chooses between host and device code; there is no device here.
NV_TARGET = """
#define NV_IF_TARGET(condition, ...)
#define NV_IF_ELSE_TARGET(condition, device, ...) __VA_ARGS__
"""


@dataclass(frozen=True)
class Symbol:
    """A function that a library exports, with its symbol version if it has one."""

    name: str
    version: str | None


def exported_functions(path: Path) -> list[Symbol]:
    """The functions in the dynamic symbol table of an ELF64 little-endian library; data symbols are an error (a stub can't be data)."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise BuildError(f"{path} is not a 64-bit little-endian ELF library")
    offset, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + 64 * i) for i in range(count)]
    by_type = {section[1]: section for section in sections}

    def text(table: int, at: int) -> str:
        start = sections[table][4] + at
        return data[start : data.index(b"\0", start)].decode()

    versions = dict(_version_names(data, by_type, text))
    symbols, numbers = by_type[11], by_type.get(0x6FFFFFFF)  # SHT_DYNSYM, SHT_GNU_versym
    found = []
    for i in range(1, symbols[5] // 24):
        name, info, _, index, _, _ = struct.unpack_from("<IBBHQQ", data, symbols[4] + 24 * i)
        kind, binding = info & 15, info >> 4
        if index in (0, 0xFFF1) or binding == 0:  # undefined, absolute (the version's own name), local
            continue
        if kind == 0 or text(symbols[6], name) in ("_init", "_fini"):  # the linker's own marks
            continue
        if kind != 2:
            raise BuildError(f"{path} exports {text(symbols[6], name)}, which is not a function: write it in C")
        number = struct.unpack_from("<H", data, numbers[4] + 2 * i)[0] & 0x7FFF if numbers else 1
        found.append(Symbol(text(symbols[6], name), versions.get(number)))
    return sorted(found, key=lambda symbol: symbol.name)


def _version_names(data: bytes, by_type: dict[int, tuple[int, ...]], text: object) -> Iterator[tuple[int, str]]:
    """(number, name) of each version that a library defines, except the one that is the file itself."""
    definitions = by_type.get(0x6FFFFFFD)  # SHT_GNU_verdef
    at = definitions[4] if definitions else 0
    for _ in range(definitions[7] if definitions else 0):
        _, flags, number, _, _, first, following = struct.unpack_from("<HHHHIII", data, at)
        if not flags & 1:  # VER_FLG_BASE
            assert definitions and callable(text)
            yield number, text(definitions[6], struct.unpack_from("<I", data, at + first)[0])
        at += following


def driver_functions(include: Path) -> list[Symbol]:
    """Every cu* name that cuda.h declares or renames to: the NVIDIA driver itself isn't there to be read."""
    header = (include / "cuda.h").read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w*)\s*\(", header))
    names.update(re.findall(r"#\s*define\s+cu[A-Z]\w*\s+(?:__CUDA_API_PT[SD][ZS]\()?(cu[A-Z]\w*)", header))
    names.update(
        ("cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop")
    )  # of cudaProfiler.h, which torch's wheels lack
    return [Symbol(name, None) for name in sorted(names)]


def entry_table(include: Path, names: Sequence[str]) -> str:
    """C table (name, CUDA version, symbol) for cuGetProcAddress, from the PFN_ types of cudaTypedefs.h.

    The n-th newest type of a name is that of the symbol with the n-th highest _vN suffix.
    """
    typedefs = (include / "cudaTypedefs.h").read_text()
    versions: dict[str, set[int]] = {}
    for name, version in re.findall(r"\*PFN_(cu[A-Z]\w*?)_v(\d{4,5})\)", typedefs):
        versions.setdefault(name, set()).add(int(version))
    rows = []
    for name in sorted(versions):
        symbols = sorted(
            (n for n in names if re.fullmatch(rf"{name}(_v\d)?", n)), key=lambda n: (len(n), n), reverse=True
        )
        pairs = list(zip(sorted(versions[name], reverse=True), symbols, strict=False))
        rows += [f'  {{"{name}", {version}, "{symbol}"}},' for version, symbol in reversed(pairs)]
    return (
        "struct ng_entry { const char *name; int version; const char *symbol; };\n"
        '__attribute__((visibility("hidden"))) const struct ng_entry ng_entries[] = {\n'
        + "\n".join(rows)
        + "\n  {0, 0, 0},\n};\n"
    )


def stubs(library: Library, names: Sequence[str], allowed: Sequence[str]) -> str:
    """C source of the generated functions: weak, so that those written in C win. A pattern of allowed.toml that this library has no name for is fine: CUDA versions differ."""
    lines = [
        "#define WEAK __attribute__((weak))",
        "extern int ng_refuse(const char *, int);",
        "extern void ng_log(int, const char *, ...);",
    ]
    for name in names:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
            lines.append(f'WEAK int {name}(void) {{ ng_log(3, "{name}"); return 0; }}')
        else:
            lines.append(f'WEAK int {name}(void) {{ return ng_refuse("{name}", {library.refuse}); }}')
    return "\n".join(lines) + "\n"


def version_script(symbols: Sequence[Symbol], own: Sequence[str]) -> str:
    """Linker script that gives every exported name the real library's symbol version and hides everything else."""
    groups: dict[str | None, list[str]] = {}
    for symbol in symbols:
        groups.setdefault(symbol.version, []).append(symbol.name)
    groups.setdefault(None, []).extend(own)
    if set(groups) == {None}:
        return "{ global: " + " ".join(f"{name};" for name in groups[None]) + " local: *; };\n"
    text = "".join(
        f"{version} {{ global: {' '.join(name + ';' for name in names)} local: *; }};\n"
        for version, names in groups.items()
        if version
    )
    if groups[None]:
        raise BuildError(f"a library mixes versioned and unversioned names: {groups[None][:3]}")
    return text


def run(argv: Sequence[str | Path]) -> None:
    """Run one compiler command; raises BuildError with its words."""
    try:
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(
            f"{argv[0]} is not installed; the null GPU's libraries need a C compiler to be built"
        ) from error
    if done.returncode:
        raise BuildError(f"failed: {' '.join(str(word) for word in argv)}\n{done.stderr}")


def soname(path: Path) -> str:
    """`libcudart.so.13` for a real library's path; its file is named so in the wheels."""
    return path.name


def real_library(site: Path, library: Library) -> Path:
    """The one real library in the wheels; raises BuildError for none or several."""
    found = [
        path for path in sorted((site / "nvidia").glob(library.pattern)) if re.fullmatch(r"\w+\.so\.\d+", path.name)
    ]
    if len(found) != 1:
        raise BuildError(
            f"{site}/nvidia/{library.pattern}: expected one library, found {len(found)}; is a CUDA build of torch installed there?"
        )
    return found[0]


def include_directories(site: Path) -> list[Path]:
    """The wheels' headers, the CUDA runtime's first; Triton's last, for crt/, which no wheel that torch needs has."""
    headers = sorted((site / "nvidia").glob("*/include"), key=lambda path: (not (path / "cuda.h").is_file(), path))
    if not headers or not (headers[0] / "cuda.h").is_file():
        raise BuildError(
            f"no cuda.h below {site}/nvidia: the null GPU needs the headers of the CUDA wheels that torch brings"
        )
    return [*headers, site / "triton" / "backends" / "nvidia" / "include"]


def build(site: Path, out: Path, compiler: str = "gcc") -> list[Path]:
    """Build all libraries into `out` and return their paths."""
    includes = include_directories(site)
    allowed = tomllib.loads((HERE / "allowed.toml").read_text())
    out.mkdir(parents=True, exist_ok=True)
    # -w-free on purpose except unused parameters: signatures are NVIDIA's.
    flags = [
        "-std=gnu11",
        "-O2",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-enum-conversion",
        "-Wno-builtin-declaration-mismatch",
    ]
    flags += [word for path in includes for word in ("-isystem", str(path))]
    results: list[Path] = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as pool:
        work = Path(temporary)
        (work / "nv").mkdir()
        (work / "nv" / "target").write_text(NV_TARGET)
        flags += ["-isystem", str(work)]
        sources = [source for library in LIBRARIES for source in library.sources]
        list(pool.map(lambda s: run([compiler, *flags, "-I", HERE, "-c", HERE / s, "-o", work / f"{s}.o"]), sources))
        for library in LIBRARIES:
            objects: list[str | Path] = [work / f"{source}.o" for source in library.sources]
            if library.pattern:
                real = real_library(site, library)
                name, symbols, own = soname(real), exported_functions(real), []
                objects += ["-L", work, "-l:libcuda.so.1"]
            else:
                name, symbols = "libcuda.so.1", driver_functions(includes[0])
                own = ["ng_*", "nullgpu_*"]
                (work / "entries.c").write_text(entry_table(includes[0], [symbol.name for symbol in symbols]))
                run([compiler, "-fPIC", "-c", work / "entries.c", "-o", work / "entries.o"])
                objects.append(work / "entries.o")
            generated = stubs(library, [symbol.name for symbol in symbols], allowed[library.key]["allowed"])
            (work / f"{library.key}.c").write_text(generated)
            (work / f"{library.key}.map").write_text(version_script(symbols, own))
            run(
                [
                    compiler,
                    "-w",
                    "-O1",
                    "-fPIC",
                    "-fno-builtin",
                    "-c",
                    work / f"{library.key}.c",
                    "-o",
                    work / f"{library.key}.o",
                ]
            )
            script = f"-Wl,--version-script={work / f'{library.key}.map'}"
            run(
                [
                    compiler,
                    "-shared",
                    f"-Wl,-soname,{name}",
                    script,
                    "-Wl,-z,defs",
                    "-s",
                    "-o",
                    work / name,
                    work / f"{library.key}.o",
                    *objects,
                ]
            )
            shutil.copy(work / name, out / f".{name}")
            (out / f".{name}").replace(out / name)  # a process that uses the old file keeps it
            results.append(out / name)
    return results


def main() -> int:
    """Command line; prints the built files, or the error and exit code 1."""
    parser = argparse.ArgumentParser(description="Build the null GPU's libraries for the torch in SITE.")
    parser.add_argument(
        "--site",
        type=Path,
        required=True,
        metavar="SITE_PACKAGES",
        help="directory that holds torch, triton and nvidia",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the libraries go")
    parser.add_argument("--cc", default="gcc", help="C compiler (default: gcc)")
    args = parser.parse_args()
    try:
        for path in build(args.site, args.out, args.cc):
            print(f"{path}  {path.stat().st_size:,} bytes")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
