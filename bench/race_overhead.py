"""What the autotuner's thread fix costs in a warm launch: time per launch with and without it, alternating in one run.

The kernel behind the autotuner is a real compiled one when a GPU (or the null GPU) is there, `--kernel object` replaces
it by a Python object that does nothing: then only the autotuner's own Python is measured, which is the worst case.

    PYTHONPATH=builder/inside python bench/race_overhead.py [--kernel real|object] [--rounds 200] [--json]

Times are CPU time of the launching thread: a shared machine takes turns away, but not those.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ["BLACKWELL_STARTUP"] = "0"  # this script arms and disarms by itself


def real_launch() -> Callable[[], object]:
    """A warm launch of an autotuned kernel with six arguments on `cuda:0` (real or null)."""
    import torch
    import triton
    import triton.language as tl

    @triton.autotune([triton.Config({"B": 64}, num_warps=n) for n in (1, 2)], key=["n"])
    @triton.jit
    def add(x, y, out, n, scale, B: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * B + tl.arange(0, B)
        mask = i < n
        tl.store(out + i, tl.load(x + i, mask=mask) + scale * tl.load(y + i, mask=mask), mask=mask)

    x = torch.empty(64, device="cuda")
    add.cache = _Tuned(add.configs[0])  # no benchmark: noise under the null GPU
    return lambda: add[(1,)](x, x, x, 64, 1.0)


def object_launch() -> Callable[[], object]:
    """The same autotuner over a Python object."""
    from triton.runtime import autotuner

    class Kernel:
        @property
        def fn(self) -> Callable[[], None]:
            return lambda: None

        def run(self, *args: Any, **kwargs: Any) -> None: ...

    names = ["x", "y", "out", "n", "scale", "B"]
    configs = [autotuner.Config({"B": 64}, num_warps=n) for n in (1, 2)]
    tuner = autotuner.Autotuner(Kernel(), names, configs, ["n"], None, None)
    tuner.cache = _Tuned(configs[0])
    return lambda: tuner.run(1, 1, 1, 64, 1.0, grid=(1,), warmup=False)


class _Tuned(dict[Any, Any]):
    """A tuning cache that answers every key with one config."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: object) -> object:
        return self.config


def per_launch_us(launch: Callable[[], object], launches: int) -> float:
    """Microseconds of this thread's CPU time per launch."""
    start = time.thread_time_ns()
    for _ in range(launches):
        launch()
    return (time.thread_time_ns() - start) / launches / 1e3


def main() -> int:
    """Measure, print, and exit with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=["real", "object"], default="real")
    parser.add_argument("--rounds", type=int, default=200, help="pairs of measurements")
    parser.add_argument("--launches", type=int, default=400, help="launches per measurement")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="race-overhead-"))
    launch = real_launch() if args.kernel == "real" else object_launch()

    import triton
    from blackwell import autotuner_race

    plain: list[float] = []
    fixed: list[float] = []
    launch()
    for round_number in range(args.rounds):
        for armed in (False, True) if round_number % 2 else (True, False):  # neither is always the warmer one
            if armed:
                needed = autotuner_race.arm()
            else:
                autotuner_race.disarm()
            per_launch_us(launch, 100)  # let the interpreter specialize again after the class changed
            (fixed if armed else plain).append(per_launch_us(launch, args.launches))
    extra = statistics.median(f - p for f, p in zip(fixed, plain, strict=True))  # of neighbours, so drift cancels out
    result = {
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "kernel": args.kernel,
        "needed": needed,
        "plain_us": round(statistics.median(plain), 3),
        "fixed_us": round(statistics.median(fixed), 3),
        "overhead_us": round(extra, 3),
        "overhead_percent": round(extra / statistics.median(plain) * 100, 2),
        "fastest_plain_us": round(min(plain), 3),
        "fastest_fixed_us": round(min(fixed), 3),
    }
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:18} {value}")
    sys.stdout.flush()
    os._exit(0)  # the null GPU may hang at interpreter exit (warm.md)


if __name__ == "__main__":
    main()
