"""Eight threads over FLA's real ops under the null GPU: cold tuning, then warm launches, with the race closed.

The kernels are warmed by one thread first, as in the image, so that the threads tune without compiling. What this adds
to test_race_autotuner.py is FLA's own autotuner class and its real kernels; that one forces the bad interleavings.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import blackwell
import pytest

INSIDE = Path(blackwell.__file__).resolve().parents[1]
THREADS = 8

JOB = """
import gc, json, os, sys, threading
if sys.argv[1] == "fixed":
    import blackwell.startup
import torch
from fla.modules.l2norm import l2norm
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from triton.runtime.autotuner import Autotuner
from blackwell import autotuner_race

misses = []
import triton
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else misses.append(src.name)

def bench(call, quantiles):
    call()
    return [1.0, 1.0, 1.0]  # timings under the null GPU mean nothing

for tuner in [o for o in gc.get_objects() if isinstance(o, Autotuner)]:
    tuner.configs = tuner.configs[:2]  # enough for a race, and quick to warm
    tuner._do_bench = bench

def work():
    def tensor(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = tensor(1, 64, 1, 64), tensor(1, 64, 1, 64), tensor(1, 64, 1, 64)
    with torch.no_grad():  # its backward has most of the kernels, and would take minutes to warm
        chunk_gated_delta_rule(q, k, v, tensor(1, 64, 1), tensor(1, 64, 1))
    l2norm(q).sum().backward()  # launches from the autograd thread

errors = []
def body(gate):
    try:
        gate.wait()
        for _ in range(3):
            work()
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")
        gate.abort()

number = int(sys.argv[2])
gate = threading.Barrier(number)
threads = [threading.Thread(target=body, args=(gate,), daemon=True) for _ in range(number)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(200)
tuned = sum(len(t.cache) for t in gc.get_objects() if isinstance(t, Autotuner))
answer = {"errors": errors, "tuned": tuned, "misses": len(misses), "armed": autotuner_race.is_armed()}
print(json.dumps({**answer, "alive": sum(t.is_alive() for t in threads)}), flush=True)
os._exit(0)
"""


def run_job(job: Path, cache: Path, mode: str, threads: int) -> dict[str, object]:
    """Run the job under the null GPU; its answer."""
    from blackwell import nullgpu

    card = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    try:
        command, environment = nullgpu.command([sys.executable, str(job), mode, str(threads)], card)
    except nullgpu.NullGpuError as missing:
        pytest.skip(f"no null GPU here: {missing}")
    merged = {
        **os.environ,
        **environment,
        "TRITON_CACHE_DIR": str(cache),
        "FLA_TILELANG": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INSIDE), environment.get("PYTHONPATH", "")])),
    }
    merged.pop("BLACKWELL_STARTUP", None)
    if mode == "plain":
        merged["BLACKWELL_STARTUP"] = "0"
    done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_eight_threads_over_fla(tmp_path: Path) -> None:
    pytest.importorskip("fla")
    job = tmp_path / "job.py"
    job.write_text(JOB)
    cache = tmp_path / "cache"
    first = run_job(job, cache, "fixed", 1)
    assert first["errors"] == [] and first["armed"] is True
    assert isinstance(first["tuned"], int) and first["tuned"] > 3
    stress = run_job(job, cache, "fixed", THREADS)
    assert stress == {"errors": [], "tuned": first["tuned"], "misses": 0, "armed": True, "alive": 0}
