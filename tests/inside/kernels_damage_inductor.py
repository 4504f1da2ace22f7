"""Tries every kind of damage on a real Inductor cache and prints what torch does, as JSON; for the CPU, needs no GPU.

    python kernels_damage_inductor.py WORK_DIRECTORY [FILE-KIND ...]

As kernels_damage.py: one import, a forked process for every trial. (torch refuses CUDA in a forked process.)
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.compile_fx
from kernels_damage import in_child
from torch._dynamo.utils import counters

KINDS = ("missing", "empty", "truncated", "garbage", "foreign")
FILES = {
    "fxgraph": "inductor/fxgraph/*/*/*",
    "aotautograd": "inductor/aotautograd/*/*",
    "code": "inductor/??/c*.py",
    "library": "inductor/*/*.main.so",  # others are probes of the compiler, which a warm run doesn't load
    "source": "inductor/*/*.cpp",
}


def work() -> str:
    """Compile and run a function forward and backward; what the caches did, in words."""
    y = torch.arange(256.0, requires_grad=True)
    result = torch.compile(lambda t: torch.nn.functional.silu(t * 3.0).sum())(y)
    result.backward()
    expected = torch.nn.functional.silu(torch.arange(256.0) * 3.0).sum()
    if not torch.allclose(result.detach(), expected) or y.grad is None or not torch.isfinite(y.grad).all():
        return "computes rubbish"
    misses = [
        f"{n} {name} missed"
        for name, n in (
            ("autograd", counters["aot_autograd"].get("autograd_cache_miss", 0)),
            ("graph", counters["inductor"].get("fxgraph_cache_miss", 0)),
        )
        if n
    ]
    return ", ".join(misses) or "hit"


def chosen(root: Path, file: str) -> list[Path]:
    """The files of that sort, sorted."""
    return sorted(path for path in root.glob(FILES[file]) if path.is_file())


def damage(root: Path, file: str, kind: str) -> Path:
    """Damage one file; returns its path."""
    path, *others = chosen(root, file)
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "foreign":
        path.write_bytes(others[0].read_bytes() if others else b"{}")
    else:
        changed = {"empty": b"", "truncated": content[: len(content) // 2], "garbage": bytes(255 - b for b in content)}
        path.write_bytes(changed[kind])
    return path


def main(root: Path, wanted: list[str]) -> None:
    """Fill, damage, look up; damaged copies stay in ROOT/FILE-KIND."""
    live, pristine = root / "live", root / "pristine"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(live / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(live / "triton")
    cold = in_child(work)
    warm = in_child(work)
    if warm != "hit":
        sys.exit(f"the cache is not warm: first run {cold}, second run {warm}")
    shutil.copytree(live, pristine)
    results = {}
    for file in FILES:
        for kind in [kind for kind in KINDS if not wanted or f"{file}-{kind}" in wanted]:
            shutil.rmtree(live)
            shutil.copytree(pristine, live)
            if not chosen(live, file):
                continue
            path = damage(live, file, kind)
            shutil.copytree(live, root / f"{file}-{kind}")
            results[f"{file}-{kind}"] = {"path": str(path.relative_to(live)), "first": in_child(work)}
            print(file, kind, results[f"{file}-{kind}"]["first"], file=sys.stderr, flush=True)
    shutil.rmtree(live)
    shutil.copytree(pristine, live)
    print(json.dumps({"torch": torch.__version__, "cold": cold, "warm": warm, "results": results}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
