"""The fingerprint of a kernel cache: which Triton, torch, assemblers, Python and compute capabilities it was made for.

Computed from package metadata and files, without importing torch or triton, so that an image build can name the cache
directory before anything is compiled: `python -m blackwell.fingerprint --capability 12.0`.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blackwell.output import emit_json, say

BLACKWELL_ARCH = 100
"""Triton takes `ptxas-blackwell` from this arch (10 * major + minor) up, `ptxas` below."""

LENGTH = 16
"""Hex digits of a fingerprint."""


class FingerprintError(Exception):
    """A part of the fingerprint is not installed or does not run; the message says which and what to do."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a fingerprint is made of, as text."""

    triton: str
    torch: str
    python: str
    machine: str
    assemblers: Mapping[str, str]
    capabilities: tuple[str, ...]

    def digest(self) -> str:
        """`LENGTH` hex digits, equal for equal parts on any machine."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def normalize_capabilities(capabilities: Iterable[str]) -> tuple[str, ...]:
    """Sorted, without duplicates: ("12.0", "10.0", "12.0") -> ("10.0", "12.0").

    Raises FingerprintError for an empty list and for other spellings such as "sm_120".
    """
    seen: set[tuple[int, int]] = set()
    for text in capabilities:
        match = re.fullmatch(r"(\d+)\.(\d)", text.strip())
        if match is None:
            raise FingerprintError(f"compute capability {text!r} is not MAJOR.MINOR; write for example 12.0")
        seen.add((int(match[1]), int(match[2])))
    if not seen:
        raise FingerprintError("no compute capability given; add for example --capability 12.0")
    return tuple(f"{major}.{minor}" for major, minor in sorted(seen))


def distribution_version(name: str) -> str:
    """The version of an installed distribution. Raises FingerprintError when it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as missing:
        raise FingerprintError(
            f"{name} is not installed for {sys.executable}; a kernel cache belongs to one {name}"
        ) from missing


def package_directory(name: str) -> Path:
    """Where a top-level package lies, found without importing it. Raises FingerprintError when it is missing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise FingerprintError(f"package {name} is not importable for {sys.executable}")
    return Path(next(iter(spec.submodule_search_locations)))


def version_text(program: Path | str) -> str | None:
    """What `program --version` prints, when Triton would accept the program (it looks for "release X.Y"), else None."""
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if re.search(r"release \d+\.\d+", done.stdout) else None


def assembler(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The assembler that Triton really uses for `name` ("ptxas" or "ptxas-blackwell").

    Triton asks TRITON_PTXAS_PATH or TRITON_PTXAS_BLACKWELL_PATH first and silently falls back to its bundled one when
    that program does not run; so does this. Raises FingerprintError when neither runs.
    """
    asked = environment.get(f"TRITON_{name.upper().replace('-', '_')}_PATH")
    bundled = package_directory("triton") / "backends" / "nvidia" / "bin" / name
    for program in (asked, bundled):
        if program and version_text(program) is not None:
            return Path(program)
    raise FingerprintError(f"Triton's assembler {bundled} does not run; reinstall triton or set its path variable")


def assembler_texts(capabilities: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Version texts of the assemblers for these capabilities, by name.

    Below Blackwell, Inductor sets TRITON_PTXAS_PATH to `torch/bin/ptxas` when torch ships one, so that one counts too.
    """
    texts: dict[str, str] = {}
    arches = [int(major) * 10 + int(minor) for major, minor in (c.split(".") for c in capabilities)]
    wanted = sorted({"ptxas-blackwell" if arch >= BLACKWELL_ARCH else "ptxas" for arch in arches})
    for name in wanted:
        texts[name] = (version_text(assembler(name, environment)) or "").strip()
    if "ptxas" in wanted:
        of_torch = version_text(package_directory("torch") / "bin" / "ptxas")
        if of_torch is not None:
            texts["torch/bin/ptxas"] = of_torch.strip()
    return texts


def collect(capabilities: Iterable[str], environment: Mapping[str, str] = os.environ) -> Parts:
    """The parts for this interpreter's installed packages. Raises FingerprintError when one is missing."""
    wanted = normalize_capabilities(capabilities)
    return Parts(
        triton=distribution_version("triton"),
        torch=distribution_version("torch"),
        python=f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}",
        machine=platform.machine(),
        assemblers=assembler_texts(wanted, environment),
        capabilities=wanted,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fingerprint (or, with --json, its parts); exit code 1 when it can't be computed."""
    parser = argparse.ArgumentParser(prog="python -m blackwell.fingerprint", description=__doc__)
    parser.add_argument(
        "--capability", action="append", default=[], metavar="X.Y", help="compute capability, repeatable"
    )
    parser.add_argument("--json", action="store_true", help="the parts as JSON")
    args = parser.parse_args(argv)
    try:
        parts = collect(args.capability)
    except FingerprintError as problem:
        say(f"blackwell.fingerprint: {problem}")
        return 1
    if args.json:
        emit_json({"fingerprint": parts.digest(), **asdict(parts)})
    else:
        print(parts.digest())
    return 0


if __name__ == "__main__":
    sys.exit(main())
