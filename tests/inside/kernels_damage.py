"""Tries every kind of damage on a real Triton cache and prints what Triton does, as JSON; needs Triton alone, no GPU.

    python kernels_damage.py WORK_DIRECTORY

Triton is imported once; every trial runs in a forked process on its own copy of the cache, because some of them end it.
"""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import autotuner
from triton.runtime.build import compile_module_from_src

TARGET = GPUTarget("cuda", 120, 32)
C_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
"""


@triton.jit
def scale(x, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) * 2.0, mask=i < n)


@triton.jit
def shift(x, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1.0, mask=i < n)


class Driver:
    """As much of an active driver as a cache look-up needs."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


def look_up(kernel: Any) -> tuple[bool, dict[str, bytes]]:
    """(hit, files by stage) for one kernel, through `triton.compile`."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    source = ASTSource(kernel, {"x": "*fp32", "n": "i32", "B": "constexpr"}, {"B": 64})
    compiled = triton.compile(source, target=TARGET)
    asm = {k: v if isinstance(v, bytes) else str(v).encode() for k, v in compiled.asm.items()}
    metadata = {k: str(v) for k, v in compiled.metadata._asdict().items()}
    return hits[-1], {**asm, "metadata": json.dumps(metadata).encode()}


def tune(kernel: Any) -> tuple[bool, dict[str, bytes]]:
    """(hit, winner) of an autotuner that keeps its timings on disk."""
    benched: list[int] = []

    def do_bench(call: Callable[[], None], quantiles: object) -> list[float]:
        benched.append(1)
        return [float(len(benched) if kernel is scale else -len(benched))] * 3  # the other kernel's winner is the other

    configs = [autotuner.Config({"B": 64}, num_warps=n) for n in (1, 2)]
    tuner = autotuner.Autotuner(
        kernel, ["x", "n", "B"], configs, ["n"], None, None, do_bench=do_bench, cache_results=True
    )
    tuner.nargs = {"x": 0, "n": 64}
    kernel.run = lambda *args, **kwargs: None
    try:
        tuner.run(0, 64)
    finally:
        del kernel.run
    return not benched, {"winner": str(tuner.best_config).encode()}


def module(name: str) -> tuple[bool, dict[str, bytes]]:
    """(hit, nothing) of a compiled C module such as `cuda_utils`."""
    built: list[int] = []
    build = triton.runtime.build._build

    def counting(*args: Any, **kwargs: Any) -> Any:
        built.append(1)
        return build(*args, **kwargs)

    triton.runtime.build._build = counting
    loaded = compile_module_from_src(C_MODULE.replace("NAME", name), name)
    assert loaded.__name__ == name
    return not built, {}


LOOK_UPS: dict[str, Callable[[], tuple[bool, dict[str, bytes]]]] = {
    "kernel": lambda: look_up(scale),
    "autotune": lambda: tune(scale),
    "module": lambda: module("tiny"),
}


def fill() -> None:
    """Warm everything the trials look up, and a second one of each for files from elsewhere."""
    look_up(scale), look_up(shift), tune(scale), tune(shift), module("tiny"), module("other")


def the(root: Path, pattern: str) -> Path:
    """The one file that matches."""
    (path,) = root.glob(f"triton/*/{pattern}")
    return path


FILES = {
    "group": ("kernel", "__grp__scale.json", "__grp__shift.json"),
    "metadata": ("kernel", "scale.json", "shift.json"),
    "cubin": ("kernel", "scale.cubin", "shift.cubin"),
    "ptx": ("kernel", "scale.ptx", "shift.ptx"),
    "llir": ("kernel", "scale.llir", "shift.llir"),
    "ttgir": ("kernel", "scale.ttgir", "shift.ttgir"),
    "ttir": ("kernel", "scale.ttir", "shift.ttir"),
    "source": ("kernel", "scale.source", "shift.source"),
    "autotune": ("autotune", "scale.autotune.json", "shift.autotune.json"),
    "module": ("module", "tiny.*.so", "other.*.so"),
}


def damage(root: Path, file: str, kind: str) -> Path:
    """Damage one file of the cache at `root`; returns its path."""
    _, name, other = FILES[file]
    path = the(root, name)
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "garbage":
        path.write_bytes(bytes(255 - byte for byte in content))
    elif kind == "foreign":
        path.write_bytes(the(root, other).read_bytes())
    elif kind == "relocated":  # copied from a place that is gone
        path.write_text(path.read_text().replace(str(root), "/gone"))
    return path


def trials() -> list[tuple[str, str]]:
    kinds = ["missing", "empty", "truncated", "garbage", "foreign"]
    return [(file, kind) for file in FILES for kind in kinds] + [("group", "relocated")]


def in_child(work: Callable[[], str]) -> str:
    """Run in a forked process; its answer, or the signal that ended it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            answer = work()
        except BaseException as error:
            answer = f"raises {type(error).__name__}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return f"crashes (signal {os.WTERMSIG(status)})" if os.WIFSIGNALED(status) else answer


def trial(look: Callable[[], tuple[bool, dict[str, bytes]]], good: dict[str, bytes]) -> str:
    """What a look-up does: hit, hit without STAGE, loads rubbish STAGE, recompiles."""
    hit, files = look()
    if not hit:
        return "recompiles"
    lost, wrong = sorted(good.keys() - files.keys()), sorted(k for k in files if files[k] != good.get(k))
    return f"loads rubbish {','.join(wrong)}" if wrong else f"hit without {','.join(lost)}" if lost else "hit"


def main(work: Path) -> None:
    """Fill, damage, look up; leaves each damaged cache in WORK/FILE-KIND for the caller to verify and repair."""
    assert threading.active_count() == 1
    triton.runtime.driver.set_active(Driver())
    live = work / "live"
    triton.knobs.cache.dir = str(live / "triton")
    in_child(lambda: fill() or "filled")  # type: ignore[func-returns-value]
    pristine = work / "pristine"
    shutil.copytree(live, pristine, symlinks=True)
    goods: dict[str, dict[str, bytes]] = {}
    for name, look in LOOK_UPS.items():
        if name != "module":  # loaded here once, it would never be loaded from its file again
            hit, goods[name] = look()
            assert hit, f"{name} is not warm"
    results: dict[str, Any] = {}
    for file, kind in trials():
        shutil.rmtree(live)
        shutil.copytree(pristine, live)
        path = damage(live, file, kind)
        snapshot = work / f"{file}-{kind}"
        shutil.copytree(live, snapshot)
        look = LOOK_UPS[FILES[file][0]]
        good = goods.get(FILES[file][0], {})
        first = in_child(lambda look=look, good=good: trial(look, good))  # type: ignore[misc]
        second = in_child(lambda look=look, good=good: trial(look, good))  # type: ignore[misc]
        results[f"{file}-{kind}"] = {"path": str(path.relative_to(live)), "first": first, "second": second}
    shutil.rmtree(live)
    shutil.copytree(pristine, live)
    print(json.dumps({"triton": triton.__version__, "results": results}))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
