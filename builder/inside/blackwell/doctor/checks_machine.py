"""Checks of the container around the job: system programs, shared memory, environment variables."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from blackwell import paths
from blackwell.doctor.finding import Finding, Seen, failed, passed, skipped, warned
from blackwell.doctor.places import triton_directory

SHARED_MEMORY = 1 << 30
"""Bytes below which /dev/shm is called small; Docker's default is 64 MiB. DataLoader workers and NCCL use it."""

FLA_CACHE_MODES = ("disabled", "strict", "fuzzy", "full", "default", "always")
"""What FLA >= 0.5.1 accepts in FLA_CACHE_MODE; anything else raises at import, older ones ignore it."""

NEVER_WARM = {
    "TRITON_ALWAYS_COMPILE": ("1", "true", "on", "yes", "y"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("1",),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": ("0",),
    "TORCHINDUCTOR_AUTOGRAD_CACHE": ("0",),
}
"""Variables, and the values of them that switch a kernel cache off."""

IN_KEYS = (
    "CXX",
    "TRITON_DEBUG",
    "TRITON_CACHE_MANAGER",
    "TRITON_REMOTE_CACHE_BACKEND",
    "TRITON_INSTRUMENTATION_MODE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM",
    "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_FREEZING",
    "TORCH_COMPILE_DEBUG",
    "PTXAS_OPTIONS",
    "TRITON_MOCK_PTX_VERSION",
)
"""Variables that change a Triton or Inductor entry's key, or the place where it is looked for, and nothing else.
Triton's own list of invalidating variables is asked from Triton itself."""


def image(seen: Seen) -> Finding:
    """Whether the image says what it is."""
    if seen.facts is None:
        return failed(f"image.json can't be read: {seen.facts_problem}", "run doctor inside an image of this project")
    override = seen.facts.get("override")
    text = str(seen.facts.get("id", "without identifier"))
    return passed(f"{text}, with override {override}" if override else text)


def known_bad(seen: Seen) -> Finding:
    """What the matrix's rules said of these versions when the image was made: notes, nothing about this machine."""
    names = [str(rule["id"]) for rule in (seen.facts or {}).get("rules", ())]
    if not names:
        return passed("nothing is known against these versions")
    return passed(f"{len(names)} notes, see `rules` in {paths.root() / 'image.json'}: {', '.join(names)}")


def python(seen: Seen) -> Finding:
    """Whether `python` is the interpreter that the image's packages are installed for."""
    first = shutil.which("python", path=seen.environment.get("PATH", os.defpath))
    own = Path(sys.prefix) / "bin"
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = seen.version("python")
    if wanted and not (wanted == running or wanted.startswith(running + ".")):
        return failed(f"Python {running} runs, the image is made for {wanted}", "run /opt/venv/bin/python")
    if first is None or Path(first).parent != own:
        return warned(f"`python` on PATH is {first or 'missing'}, not {own / 'python'}", f"put {own} first in PATH")
    return passed(f"Python {running}, {first}")


def ldconfig(seen: Seen) -> Finding:
    """Triton <= 3.7 runs `/sbin/ldconfig -p` before it looks into its cache: without it nothing starts."""
    program = "/sbin/ldconfig"
    if not os.access(program, os.X_OK):
        return failed(f"{program} is missing; Triton runs it before it looks into its cache", "install libc-bin again")
    try:
        done = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError) as problem:
        return failed(f"{program} -p fails: {problem}", "install libc-bin again")
    if not seen.judge_gpu or seen.gpus.driver is None:
        return passed(f"{program} runs")
    if "libcuda.so.1" in done.stdout:
        return passed(f"{program} runs and knows libcuda.so.1")
    by_path = [
        directory
        for directory in seen.environment.get("LD_LIBRARY_PATH", "").split(":")
        if directory and os.path.exists(os.path.join(directory, "libcuda.so.1"))
    ]
    if by_path:
        return passed(f"{program} runs; libcuda.so.1 comes from LD_LIBRARY_PATH ({by_path[0]})")
    return failed(
        "the loader's cache doesn't know libcuda.so.1: Triton won't find it",
        "run ldconfig as root, or put its directory into LD_LIBRARY_PATH",
    )


def compiler(seen: Seen) -> Finding:
    """gcc and Python.h: only for kernels that are not warm, but without them FLA believes that there is no GPU.

    Public report: https://github.com/theroyallab/tabbyAPI/issues/453
    """
    path = seen.environment.get("PATH", os.defpath)
    asked = seen.environment.get("CC")
    if asked and shutil.which(asked, path=path) is None:
        return failed(f"CC={asked} is not a program here: Triton can't compile its launcher", "unset CC or correct it")
    found = asked or next((name for name in ("gcc", "clang", "cc") if shutil.which(name, path=path)), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [text for text, there in (("a C compiler", found), (str(header), header.is_file())) if not there]
    if missing:
        return warned(
            f"{' and '.join(missing)} missing: a kernel that isn't warm can't be compiled",
            "install gcc and the Python headers again",
        )
    return passed(f"{found} and {header}")


def shared_memory(seen: Seen) -> Finding:
    """The size of /dev/shm."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError as problem:
        return failed(f"/dev/shm: {problem.strerror}", "mount a tmpfs there: --shm-size=16g or --ipc=host")
    size = facts.f_frsize * facts.f_blocks
    text = f"/dev/shm has {_size(size)}"
    if not os.access("/dev/shm", os.W_OK):
        return failed(f"{text}, but user {os.geteuid()} can't write it", "mount it with mode 1777")
    if size < SHARED_MEMORY:
        return warned(
            f"{text}: DataLoader workers and NCCL run out of it",
            "--shm-size=16g or --ipc=host; on Kubernetes an emptyDir of medium Memory",
        )
    return passed(text)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def assembler(seen: Seen) -> Finding:
    """The variables that name Triton's assembler. https://github.com/triton-lang/triton/issues/10331"""
    if value := seen.environment.get("TRITON_PTXAS_PATH"):
        return failed(
            f"TRITON_PTXAS_PATH={value} does nothing on Blackwell: Triton takes ptxas-blackwell there",
            "unset it; TRITON_PTXAS_BLACKWELL_PATH is the one that counts",
        )
    value = seen.environment.get("TRITON_PTXAS_BLACKWELL_PATH")
    if not value:
        return passed("Triton's own ptxas-blackwell")
    todo = "unset TRITON_PTXAS_BLACKWELL_PATH: Triton brings the assembler that the cache was made with"
    if not os.access(value, os.X_OK) or os.path.isdir(value):
        return failed(f"TRITON_PTXAS_BLACKWELL_PATH={value} is no program: Triton silently takes its own", todo)
    asked = _release(value)
    if asked is None:
        return failed(
            f"TRITON_PTXAS_BLACKWELL_PATH={value} doesn't tell a version: Triton silently takes its own", todo
        )
    directory = triton_directory()
    own = _release(str(directory / "backends" / "nvidia" / "bin" / "ptxas-blackwell")) if directory else None
    if own is None:
        return warned(f"{value} is {asked}; Triton's own can't be asked, so they can't be compared", todo)
    if asked != own:
        return failed(
            f"TRITON_PTXAS_BLACKWELL_PATH={value} is {asked}, the cache was made with {own}: every kernel misses", todo
        )
    return passed(f"{value} is {asked}, as Triton's own")


def _release(program: str) -> str | None:
    """The version line of an assembler, such as "V13.1.80"; the whole text is in Triton's key."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    match = re.search(r"release \d+\.\d+, (V[\d.]+)", done.stdout)
    return match[1] if match else None


def fla_variables(seen: Seen) -> Finding:
    """FLA's switches: a wrong mode raises at import, TileLang must be off on Blackwell."""
    environment = seen.environment
    mode = environment.get("FLA_CACHE_MODE")
    if mode is not None and mode not in FLA_CACHE_MODES:
        return failed(
            f"FLA_CACHE_MODE={mode!r} makes FLA raise at import", f"unset it or use one of {', '.join(FLA_CACHE_MODES)}"
        )
    backend = environment.get("FLA_CONV_BACKEND")
    if backend is not None and backend not in ("cuda", "triton"):
        return failed(f"FLA_CONV_BACKEND={backend!r} makes FLA's convolution raise", "unset it or use cuda or triton")
    configurations = environment.get("FLA_CONFIG_DIR")
    if configurations and not os.path.isdir(configurations):
        return warned(f"FLA_CONFIG_DIR={configurations} is no directory: FLA tunes instead", "correct or unset it")
    if environment.get("FLA_TILELANG") != "0":
        return warned(
            f"FLA_TILELANG is {environment.get('FLA_TILELANG') or 'not set'}: "
            "TileLang breaks or aborts on Blackwell when it is installed",
            "set FLA_TILELANG=0, as the image does",
        )
    said = [
        f"{name}={environment[name]}"
        for name in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR", "FLA_CONV_BACKEND")
        if environment.get(name)
    ]
    if mode not in (None, "disabled"):
        return warned(
            f"{', '.join(said)}: FLA launches the configurations of that directory unchecked",
            "make sure that they were made on this GPU with this FLA version",
        )
    return passed(", ".join(["FLA_TILELANG=0", *said]))


def key_variables(seen: Seen) -> Finding:
    """Variables that make warm entries miss; what the image itself sets (image.json, "environment") is no change."""
    own = (seen.facts or {}).get("environment", {})
    off = [
        f"{name}={seen.environment[name]}"
        for name, values in NEVER_WARM.items()
        if seen.environment.get(name, "").lower() in values
    ]
    changed = [
        f"{name}={seen.environment[name]}"
        for name in IN_KEYS
        if name in seen.environment and own.get(name) != seen.environment[name]
    ]
    if off or changed:
        parts = ([f"{', '.join(off)} switches a cache off"] if off else []) + (
            [f"{', '.join(changed)} is part of the cache's keys"] if changed else []
        )
        return warned(
            "; ".join(parts) + ": kernels compile again", "unset them, or warm the cache with the same values"
        )
    return passed("none is set")


def triton_variables(seen: Seen) -> Finding:
    """Triton's own list of variables that invalidate its cache, as the installed Triton reads them."""
    stage = seen.imports.get("triton")
    if stage is None or stage.error:
        return skipped("Triton doesn't import, so it can't be asked")
    own = (seen.facts or {}).get("environment", {})
    active = [name for name in stage.facts["key_variables"] if own.get(name) != seen.environment.get(name)]
    if active:
        return warned(
            f"{', '.join(active)} changes every Triton key: all kernels compile again",
            "unset it, or warm the cache with the same value",
        )
    return passed("none is set")
