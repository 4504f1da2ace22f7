"""Closing a warmed cache: what its keys were made of (keys.json) and what every file must be (SHA256SUMS)."""

import ast
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blackwell import fingerprint, source_keys
from blackwell.kernels import entries, sums

KEYS = "keys.json"
FORMAT = 1

INDUCTOR_VARIABLES = ("CXX", "CC", "TORCHINDUCTOR_CPP_WRAPPER")
"""Environment variables in Inductor's keys that Triton's list doesn't have (found by trying: shared warm.md)."""


def invalidating_environment() -> dict[str, str]:
    """The variables that are set and part of a key: Triton's own list, asked from Triton, and Inductor's."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    found = {str(name): str(value) for name, value in get_cache_invalidating_env_vars().items()}
    return found | {name: os.environ[name] for name in INDUCTOR_VARIABLES if name in os.environ}


def triton_checksum() -> str:
    """Short hash over Triton's own files, as far as they are in its keys."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # moved there after 3.5
        from triton.compiler.compiler import triton_key
    # Of the files as they are, not the start-up hook's remembered one: a difference is to be found here.
    return hashlib.sha256(source_keys.unarmed(triton_key)().encode()).hexdigest()[:16]


def function_checksum(file: Path | str, name: str) -> str | None:
    """Hash of the source text of the function `name` in a Python file; None when file or function isn't there."""
    try:
        text = Path(file).read_text()
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()[:16]
    return None


def source_file(cache: Path, kernel: entries.Kernel) -> str | None:
    """The Python file that a kernel was compiled from, as noted in its `.source`."""
    path = cache / kernel.entry / f"{kernel.name[:150]}.source"
    try:
        match = re.search(r'^#loc = loc\("([^"]+)":\d+:\d+\)', path.read_text(), flags=re.MULTILINE)
    except (OSError, ValueError):
        return None
    return match[1] if match else None


def gather_keys(cache: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The content of keys.json for this process's environment. `facts` must name `capabilities` (["12.0", ...])."""
    parts = fingerprint.collect(facts["capabilities"])
    kernels: dict[str, Any] = {}
    for kernel in entries.kernels(cache):
        file = source_file(cache, kernel)
        checksum = function_checksum(file, kernel.name) if file else None
        kernels[kernel.entry] = {"name": kernel.name, "file": file, "source": checksum}
    return {
        "format": FORMAT,
        "path": str(cache.resolve()),
        "fingerprint": parts.digest(),
        "triton": parts.triton,
        "triton_files": triton_checksum(),
        "torch": parts.torch,
        "python": parts.python,
        "machine": parts.machine,
        "assemblers": dict(parts.assemblers),
        "capabilities": list(parts.capabilities),
        "environment": invalidating_environment(),
        "cards": list(facts.get("cards", [])),
        "kernels": kernels,
        "facts": dict(facts),
    }


def seal(cache_dir: Path | str, facts: Mapping[str, Any]) -> None:
    """Close a cache after warming: clean it of locks and half-written leftovers, make it readable for every user,
    write keys.json and, last, SHA256SUMS. Can be repeated.

    facts: `capabilities` (required), `cards` (names as the NVIDIA driver reports them), and whatever else the report
    wants to keep. Call it in the process environment that the cache was warmed in. Raises FileNotFoundError without a
    cache, ValueError when there is damage (a damaged cache is repaired or warmed again, not sealed).
    """
    from blackwell.kernels.damage import verify_cache

    cache = Path(cache_dir)
    (cache / sums.LIST).unlink(missing_ok=True)
    for damage in verify_cache(cache):
        if damage.kind == "leftover":
            _remove(cache / damage.entry)
        else:
            raise ValueError(
                f"cannot seal {cache}: {damage.path} is {damage.kind} ({damage.detail}); run `kernels repair`"
            )
    for path in [*cache.rglob("*.lock"), *cache.rglob("lock"), *cache.rglob("__pycache__")]:
        _remove(path)
    content = json.dumps(gather_keys(cache, facts), indent=1, sort_keys=True).encode()
    sums.write_atomic(cache / KEYS, content)
    for path in [cache, *cache.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    sums.write_list(cache, {name: sums.file_sum(cache / name) for name in sums.listed_files(cache)})


def read_keys(cache: Path) -> dict[str, Any] | None:
    """keys.json, or None when there is none that can be read."""
    try:
        return entries.read_object(cache / KEYS)
    except (OSError, ValueError):
        return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
