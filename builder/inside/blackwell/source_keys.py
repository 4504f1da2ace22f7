"""The hashes that Triton and torch make of their own files in every process, remembered for as long as these files are unchanged.

Both go into every key of their caches: `triton_key` reads libtriton.so (180 MB) and Triton's Python files, `torch_key` torch's 2,200.
Of a warm first step of the toy that is 0.26 of 0.92 s on two cores with the files in memory, and 0.58 of 2.4 s on an H200 machine
(bench/first_step.py --profile). A sealed cache keeps both hashes with a stamp of the files that they are made of. What writes kernels (all of
Triton's Python, torch's Inductor) is in the stamp by content, because an image gives all its files one time, and so may whoever
patches one; the rest by name, size and time. With the same stamp the remembered hash is taken; with any other it is made anew, as ever.
Imported when torch or triton is: only small standard modules here.
"""

# pathlib would cost a job's start more than everything done here
# ruff: noqa: PTH100, PTH110, PTH113, PTH118, PTH119, PTH120, PTH123

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

FILE = "source_keys.json"
FORMAT = 1
ARMED = "_blackwell_original"  # attribute of an armed function: the one it stands for
SUFFIXES = (".py", ".so", ".cpp", ".ld")
EXTRA = ("_C", "aoti_runtime")  # of libtriton.so, and of torch's interface.cpp


def stamp(package: str) -> str:
    """A text that changes when a Python file or shared library of the package (a directory) is another."""
    everything = os.path.basename(package) == "triton"
    found = sorted(
        (path[len(package) :], size, _content(path) if _by_content(path[len(package) :], everything) else time)
        for path, size, time in _files(package)
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _by_content(name: str, everything: bool) -> bool:
    """name: below the package, with a leading slash."""
    return name.endswith(".py") and (everything or name.startswith("/_inductor/") or name.count("/") == 1)


def _content(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _files(directory: str) -> Iterator[tuple[str, int, int]]:
    """(path, bytes, nanoseconds) of every file that a hash is made of."""
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

        content["triton"] = {"stamp": stamp(os.path.dirname(triton.__file__)), "key": unarmed(triton_key)()}
    with contextlib.suppress(ImportError):
        import torch
        from torch._inductor.codecache import torch_key

        content["torch"] = {"stamp": stamp(os.path.dirname(torch.__file__)), "key": unarmed(torch_key)().hex()}
    return content


def known(name: str, package: str) -> str | None:
    """The remembered hash of `triton` or `torch`, if its files are those it was made of; else None. Never raises."""
    try:
        path = os.path.join(os.environ["BLACKWELL_CACHE"], FILE)
        if not os.path.isfile(path):  # nor a pipe, which would be waited for
            return None
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        entry = content[name]
        if content["format"] == FORMAT and entry["stamp"] == stamp(package):
            return str(entry["key"])
    except Exception:  # whatever is wrong with it: it is made of the files then
        pass
    return None


def unarmed(function: Any) -> Any:
    """The `triton_key` or `torch_key` that makes the hash of the files, of one that may be armed."""
    return getattr(function, ARMED, function)


def arm_triton(module: Any) -> None:
    """Let `triton.runtime.cache`, just loaded, take the remembered hash. Whoever imports `triton_key` later gets ours."""
    original: Callable[[], str] = module.triton_key

    @functools.lru_cache
    @functools.wraps(original)
    def triton_key() -> str:
        return known("triton", os.path.dirname(os.path.dirname(os.path.abspath(module.__file__)))) or original()

    setattr(triton_key, ARMED, original)
    module.triton_key = triton_key


def arm_torch(module: Any) -> None:
    """The same for `torch._inductor.codecache`, whose own decorator keeps `torch_key.set` and `.clear` as they were."""
    original: Callable[[], bytes] = module.torch_key

    @functools.wraps(original)
    def torch_key() -> bytes:
        key = known("torch", os.path.dirname(os.path.dirname(os.path.abspath(module.__file__)))) or ""
        return bytes.fromhex(key) if re.fullmatch("[0-9a-f]{64}", key) else original()

    module.torch_key = module.torch_key_cache(torch_key)
    setattr(module.torch_key, ARMED, original)
