"""A small job for tests of the kernel caches: run under the null GPU, it says as JSON what hit and what missed.

    python kernels_workload.py [triton] [autotune] [inductor] [new] [fla]

triton: one plain kernel; autotune: one with `cache_results`; inductor: a compiled function, forward and backward;
new: a kernel that no cache was warmed with; fla: gated delta rule and l2norm of FLA, forward and backward.
"""

import json
import os
import sys
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def scale(x, out, n, factor, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def never_warmed(x, out, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 42.0, mask=i < n)


@triton.autotune(
    [triton.Config({"B": 64}, num_warps=n) for n in (1, 2)],
    key=["n"],
    cache_results=True,
    do_bench=lambda call, quantiles: (call(), [1.0, 1.0, 1.0])[1],
)
@triton.jit
def tuned(x, out, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) - 1.0, mask=i < n)


def run_fla() -> None:
    """FLA's gated delta rule in its smallest shape."""
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    g = torch.randn(1, 64, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    beta = torch.rand(1, 64, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, _ = chunk_gated_delta_rule(l2norm(q), l2norm(k), v, g, beta)
    out.sum().backward()


def main(parts: list[str]) -> None:
    """Run the named parts; one JSON line, then a hard exit (interpreter exit under the null GPU is not reliable)."""
    events: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        events.append((src.name, cache_hit))

    triton.knobs.compilation.listener = listen
    x = torch.empty(64, device="cuda")
    if "triton" in parts:
        scale[(1,)](x, x, 64, 2.0, B=64)
    if "autotune" in parts:
        tuned[(1,)](x, x, 64)
    if "new" in parts:
        never_warmed[(1,)](x, x, 64, B=64)
    if "fla" in parts:
        run_fla()
    counters: dict[str, Any] = {}
    if "inductor" in parts:
        from torch._dynamo.utils import counters as all_counters

        y = torch.randn(256, device="cuda", requires_grad=True)
        torch.compile(lambda t: torch.nn.functional.silu(t * 3.0).sum())(y).backward()
        for group in ("inductor", "aot_autograd"):
            counters |= {name: n for name, n in all_counters[group].items() if "cache" in name}
    if "cpu" in parts:
        from torch._dynamo.utils import counters as all_counters

        z = torch.randn(256, requires_grad=True)
        torch.compile(lambda t: torch.nn.functional.silu(t * 3.0).sum())(z).backward()
        for group in ("inductor", "aot_autograd"):
            counters |= {f"cpu_{name}": n for name, n in all_counters[group].items() if "cache" in name}
    print(
        json.dumps(
            {
                "hits": sorted(name for name, hit in events if hit),
                "misses": sorted(name for name, hit in events if not hit),
                "counters": counters,
                "triton_cache": os.environ.get("TRITON_CACHE_DIR"),
            }
        ),
        flush=True,
    )
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:] or ["triton", "autotune", "inductor"])
