"""The hashes that Triton and torch make of their own files in every process, remembered for as long as these files are unchanged.

Both go into every key of their caches: `triton_key` reads libtriton.so (180 MB) and Triton's Python files, `torch_key` torch's 2,200.
Of a warm first step of the toy that is 0.26 of 0.92 s on two cores with the files in memory, and 0.58 of 2.4 s on an H200 machine
(bench/first_step.py --profile). A sealed cache keeps both hashes with a stamp: name, size and time of each file they are made of.
With the same stamp the remembered hash is taken; with any other (a patched or another Triton) it is made from the files, as ever.
Imported when torch or triton is: only small standard modules here.
"""

# pathlib would cost a job's start more than everything done here
# ruff: noqa: PTH100, PTH110, PTH118, PTH120, PTH123

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

FILE = "source_keys.json"
FORMAT = 1
SUFFIXES = (".py", ".so", ".cpp", ".ld")
EXTRA = ("_C", "aoti_runtime")  # of libtriton.so, and of torch's interface.cpp


def stamp(package: str) -> str:
    """A text that changes when any Python file or shared library of the package (a directory) is another, or elsewhere in it."""
    found = sorted((path[len(package) :], size, time) for path, size, time in _files(package))
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _files(directory: str) -> Iterator[tuple[str, int, int]]:
    for entry in os.scandir(directory):
        if entry.name.endswith(SUFFIXES):
            facts = entry.stat()
            yield entry.path, facts.st_size, facts.st_mtime_ns
        # Packages, as Triton and torch walk them, and two directories that are none; not torch's 10,000 headers.
        elif entry.is_dir() and (entry.name in EXTRA or os.path.exists(os.path.join(entry.path, "__init__.py"))):
            yield from _files(entry.path)


def gather() -> dict[str, Any]:
    """What FILE holds, made from the installed Triton and torch. One that makes no such hash where we know it is left out."""
    content: dict[str, Any] = {"format": FORMAT}
    with contextlib.suppress(ImportError):
        import triton
        from triton.runtime.cache import triton_key

        content["triton"] = {"stamp": stamp(os.path.dirname(triton.__file__)), "key": triton_key()}
    with contextlib.suppress(ImportError):
        import torch
        from torch._inductor.codecache import torch_key

        content["torch"] = {"stamp": stamp(os.path.dirname(torch.__file__)), "key": torch_key().hex()}
    return content


def known(name: str, package: str) -> str | None:
    """The remembered hash of `triton` or `torch`, if its files are those it was made of; else None. Never raises."""
    try:
        with open(os.path.join(os.environ["BLACKWELL_CACHE"], FILE), encoding="utf-8") as file:
            content = json.load(file)
        entry = content[name]
        if content["format"] == FORMAT and entry["stamp"] == stamp(package):
            return str(entry["key"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def arm_triton(module: Any) -> None:
    """Let `triton.runtime.cache`, just loaded, take the remembered hash. Whoever imports `triton_key` later gets ours."""
    original: Callable[[], str] = module.triton_key

    @functools.lru_cache
    @functools.wraps(original)
    def triton_key() -> str:
        return known("triton", os.path.dirname(os.path.dirname(os.path.abspath(module.__file__)))) or original()

    module.triton_key = triton_key


def arm_torch(module: Any) -> None:
    """The same for `torch._inductor.codecache`, whose own decorator keeps `torch_key.set` and `.clear` as they were."""
    original: Callable[[], bytes] = module.torch_key

    @functools.wraps(original)
    def torch_key() -> bytes:
        key = known("torch", os.path.dirname(os.path.dirname(os.path.abspath(module.__file__))))
        return bytes.fromhex(key) if key else original()

    module.torch_key = module.torch_key_cache(torch_key)
