"""The whole step on a card: against its CPU twin, in threads, and as the command from a cold and from a warm cache."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fla")
pytest.importorskip("transformers.models.qwen3_5", reason="this transformers has no Qwen3.5")

import blackwell  # noqa: E402
from blackwell.step import train  # noqa: E402
from blackwell.step.config import SHAPES, StepConfig  # noqa: E402


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_loss_falls_on_the_card(name: str, packed: bool, record: Callable[..., None]) -> None:
    report = train.run_step(StepConfig(device="cuda", steps=20, shape=SHAPES[name], packed=packed))
    record(
        **{
            key: report.to_dict()[key]
            for key in ("losses", "seconds", "hits", "misses", "graphs", "implementations", "peak_memory")
        }
    )
    assert report.problems == []
    assert report.losses[-1] < 0.7 * report.losses[0]
    assert "torch.compile(flex_attention)" in report.implementations["attention"]
    for kernel in ("gated_delta_rule", "causal_conv1d"):
        assert any(name.startswith(("fla.", "causal_conv1d.")) for name in report.implementations[kernel])


@pytest.mark.parametrize("packed", [False, True])
def test_card_and_cpu_agree(packed: bool, record: Callable[..., None]) -> None:
    """The same weights, batch and step: loss and gradient norm of GPU kernels in bfloat16 against the references in float32."""
    config = {"steps": 1, "packed": packed, "noise": 0.0}
    cuda, cpu = train.run_step(StepConfig(device="cuda", **config)), train.run_step(StepConfig(device="cpu", **config))
    loss = abs(cuda.losses[0] / cpu.losses[0] - 1)
    norm = abs(cuda.gradient_norms[0] / cpu.gradient_norms[0] - 1)
    record(loss=loss, gradient_norm=norm)
    assert loss < 0.005 and norm < 0.05


def test_two_replicas_in_two_threads(record: Callable[..., None]) -> None:
    parallel = train.run_step(StepConfig(device="cuda", steps=3, threads=2))
    record(losses=parallel.losses, seconds=parallel.seconds)
    assert parallel.problems == []
    assert parallel.losses[-1] < parallel.losses[0]


def command(caches: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """`blackwell step` in a fresh process with its own caches and the start-up hook that the image runs."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            p for p in (str(Path(blackwell.__file__).parents[1]), os.environ.get("PYTHONPATH")) if p
        ),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    code = "import blackwell.startup, sys; from blackwell.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "step", "--json", *words], env=env, capture_output=True, text=True, timeout=400, check=False)  # fmt: skip
    assert done.stdout.strip(), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def test_two_cold_threads_then_warm(tmp_path: Path, record: Callable[..., None]) -> None:
    """Two replicas meet the autotuner at once with cold caches; a second process then compiles nothing; another shape is noticed."""
    words = ("--device", "cuda", "--threads", "2")
    code, cold = command(tmp_path, *words)
    assert code == 0, cold
    assert cold["misses"] > 0
    code, warm = command(tmp_path, *words, "--expect-warm")
    assert code == 0, warm
    assert warm["misses"] == 0 and warm["hits"] > 0 and warm["graphs"]["fx_hit"] > 0
    record(cold=cold["seconds"], warm=warm["seconds"], cold_misses=cold["misses"], warm_hits=warm["hits"])
    code, other = command(tmp_path, *words, "--expect-warm", "--shape", "odd")
    assert code == 3 and "was not in the kernel cache" in other["error"]
