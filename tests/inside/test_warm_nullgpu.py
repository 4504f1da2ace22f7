"""The whole command on real Triton kernels and a compiled graph, under the null GPU: filled once, found by a new process, and caught."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blackwell import nullgpu, paths
from blackwell.nullgpu import NullGpuError

pytestmark = pytest.mark.slow
CARD = "NVIDIA B200"

SCRIPT = """
import os, sys, torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 32}, num_warps=1, num_stages=2), triton.Config({"BLOCK": 64}, num_warps=4, num_stages=2),
                  triton.Config({"BLOCK": 128}, num_warps=4, num_stages=9)], key=["n"])
@triton.jit
def square(x, y, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, n, 64):
        at = k + tl.arange(0, 64)
        total += tl.dot(tl.load(x + rows[:, None] * n + at[None, :]), tl.load(x + at[:, None] * n + rows[None, :]))
    tl.store(y + rows[:, None] * n + rows[None, :], total)

n = 1024
if "another-shape-every-time" in sys.argv:
    counter = sys.argv[2]
    n += 1024 * os.path.exists(counter)
    open(counter, "w").close()
x = torch.zeros(n, n, device="cuda", dtype=torch.bfloat16)
y = torch.empty(n, n, device="cuda")
square[lambda meta: (n // meta["BLOCK"],)](x, y, n)
if "another-choice" not in sys.argv:  # the same key, and a pointer that is not divisible by 16: tuned already, yet another kernel
    square[lambda meta: (n // meta["BLOCK"],)](x, torch.empty(n * n + 1, device="cuda")[1:], n)
else:  # a card that measured chose otherwise than the rule did
    for config in square.configs[:2]:  # the card can't hold the third
        square.configs = [config]
        square[lambda meta: (n // meta["BLOCK"],)](x, torch.empty(n * n + 1, device="cuda")[1:], n)
options = {"mode": "max-autotune-no-cudagraphs"} if "max-autotune" in sys.argv else {}
weight = torch.ones(48, 48, device="cuda", requires_grad=True)
torch.compile(lambda a: torch.nn.functional.gelu(a @ weight).sum(), **options)(y[:48, :48]).backward()
print("done", flush=True)
"""


def needs_null_gpu() -> None:
    try:
        nullgpu.library_files(paths.nullgpu_lib())
    except NullGpuError as error:
        pytest.skip(f"the null GPU is not built here: {error}")
    if nullgpu.driver_visible():
        pytest.skip("a real NVIDIA driver is visible here, and the null GPU refuses beside one")


class Bed:
    """A cache in a temporary directory, and the command on it."""

    def __init__(self, directory: Path) -> None:
        self.cache = directory / "cache" / "f00"
        self.script = directory / "train.py"
        self.script.write_text(SCRIPT)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TORCHINDUCTOR_"))},
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "BLACKWELL_ROOT": str(directory),
            "BLACKWELL_NULLGPU_LIB": str(paths.nullgpu_lib()),
            "TMPDIR": str(directory),
        }

    def warm(
        self, *words: str, cards: tuple[str, ...] = (CARD,), script: tuple[str, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "blackwell", "warm", "--cache", str(self.cache), "--json", *words]
        command += [word for card in cards for word in ("--card", card)]
        return subprocess.run(
            [*command, "--", sys.executable, str(self.script), *script],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.cache / "report.json").read_text()))


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    needs_null_gpu()
    bed = Bed(tmp_path_factory.mktemp("warm"))
    done = bed.warm()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cache.entries"] == len(bed.report["kernels"])
    return bed


def test_every_configuration_is_compiled_and_one_chosen_by_rule(bed: Bed) -> None:
    (choice,) = [entry for entry in bed.report["choices"] if entry["kernel"] == "square"]
    assert (choice["how"], choice["kept"], choice["arch"]) == ("static", True, 100)
    scores = {entry["config"]["BLOCK"]: entry.get("score") for entry in choice["configs"]}
    assert set(scores) == {32, 64, 128}
    best = min((score, block) for block, score in scores.items() if score is not None)[1]
    assert choice["chosen"]["BLOCK"] == best
    kernels = [entry for entry in bed.report["kernels"] if entry["kernel"] == "square"]
    assert len(kernels) == 2 * 3 and all(entry["registers"] > 0 and entry["cubin_bytes"] > 0 for entry in kernels)


def test_what_the_card_would_refuse_is_reported(bed: Bed) -> None:
    refused = [entry for entry in bed.report["rejected"] if entry["kernel"] == "square"]
    assert [entry["config"]["BLOCK"] for entry in refused] == [128], (
        "nine stages of 32 KiB of shared memory: the card has 227"
    )
    assert "shared memory" in refused[0]["reason"]


def test_whatever_a_card_chooses_is_warm_for_every_specialization(bed: Bed) -> None:
    """Tuned once for a key, launched with other arguments later: those are compiled for all configurations, not for the choice alone."""
    environment = bed.environment | nullgpu.environment(CARD) | {"TRITON_CACHE_DIR": str(bed.cache / "triton")}
    counting = (
        "import runpy, sys\n"
        "from triton import knobs\n"
        "asked = []\n"
        "knobs.compilation.listener = lambda **event: event['src'].name == 'square' and asked.append(event['cache_hit'])\n"
        f"sys.argv = [{str(bed.script)!r}, 'another-choice']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "print('hits', asked.count(True), 'misses', asked.count(False), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", counting], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    # Three while it tunes anew, then two for the other pointer.
    assert "hits 5 misses 0" in done.stdout, done.stdout + done.stderr[-3000:]


def test_a_measured_choice_is_baked_instead_of_the_static_one(bed: Bed, tmp_path: Path) -> None:
    (static,) = [entry for entry in bed.report["choices"] if entry["kernel"] == "square"]
    refused = {entry["config"]["BLOCK"] for entry in bed.report["rejected"]}
    configs = [entry["config"] for entry in static["configs"] if entry["config"]["BLOCK"] not in refused]
    other = next(config for config in configs if config != static["chosen"])
    measured = {
        "card": CARD,
        "capability": "10.0",
        "triton": importlib.metadata.version("triton"),
        "torch": importlib.metadata.version("torch"),
        "kernel": "square",
        "key": static["key"],
        "configs": [{"config": config, "ms": 0.1 if config == other else 0.2} for config in configs],
    }
    (tmp_path / "b200.json").write_text(json.dumps({"format": 1, "entries": [measured]}))
    fresh = Bed(tmp_path)
    done = fresh.warm("--bundle", str(tmp_path / "b200.json"))  # and its own check finds that choice warm
    assert done.returncode == 0, done.stderr
    (choice,) = [entry for entry in fresh.report["choices"] if entry["kernel"] == "square"]
    assert (choice["how"], choice["chosen"], choice["measured_on"]) == ("measured", other, CARD), done.stderr


def test_the_cache_is_sealed_and_sound(bed: Bed) -> None:
    from blackwell.kernels import verify_cache

    assert (bed.cache / "SHA256SUMS").exists()
    assert verify_cache(bed.cache) == []


def test_max_autotune_is_refused_and_leaves_nothing(bed: Bed) -> None:
    before = {path for path in bed.cache.rglob("*") if path.is_file() and "fxgraph" in str(path)}
    done = bed.warm("--no-check", script=("max-autotune",))
    assert done.returncode == 1
    assert "max-autotune" in json.loads(done.stdout)["error"]
    assert {path for path in bed.cache.rglob("*") if path.is_file() and "fxgraph" in str(path)} == before


def test_a_program_that_is_different_every_time_is_caught(bed: Bed, tmp_path: Path) -> None:
    done = bed.warm(script=("another-shape-every-time", str(tmp_path / "counter")))
    assert done.returncode == 1
    assert "did not find everything warm" in json.loads(done.stdout)["error"]


DEVICES = """
import sys, torch
import torch.nn.functional as F

for index in range(torch.cuda.device_count()):
    torch.cuda.set_device(index)
    weight = torch.ones(48, 48, device="cuda", requires_grad=True)
    torch.compile(lambda a: F.gelu(a @ weight).sum())(torch.ones(48, 48, device="cuda")).backward()
print("devices", torch.cuda.device_count(), flush=True)
"""


def test_every_device_that_a_job_uses_is_warm(tmp_path: Path) -> None:
    """Inductor's keys hold the device's index: a cache for two devices serves a rank that stays on its second GPU."""
    needs_null_gpu()
    bed = Bed(tmp_path)
    bed.script.write_text(DEVICES)
    done = bed.warm("--devices", "2")  # which checks itself in new processes
    assert done.returncode == 0, done.stderr
    second = bed.script.with_name("second.py")
    second.write_text(
        DEVICES.replace("range(torch.cuda.device_count())", "(1,)")
        + "from torch._dynamo.utils import counters\n"
        + "print({n: c for g in ('inductor', 'aot_autograd') for n, c in counters[g].items() if n.startswith(('fxgraph_', 'autograd_'))})\n"
    )
    environment = bed.environment | nullgpu.environment(CARD, 2)
    environment |= {
        "TRITON_CACHE_DIR": str(bed.cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(bed.cache / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, str(second)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "{'fxgraph_cache_hit': 2, 'autograd_cache_hit': 1}" in done.stdout, done.stdout + done.stderr[-3000:]
