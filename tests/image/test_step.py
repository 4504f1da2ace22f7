"""The tiny DFlash step trains inside the image: for real on the CPU everywhere, and on the card where the engine can give a container one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.image.conftest import BuiltImage, RunIn

DRIVER = Path("/proc/driver/nvidia/version")
STEPS = 12


def trained(report: dict[str, Any]) -> bool:
    """Did the loss on one batch fall, with no sign of a slow path?"""
    losses, norms = report["losses"], report["gradient_norms"]
    assert len(losses) == len(norms) == STEPS
    return bool(report["problems"] == [] and losses[-1] < 0.9 * losses[0] and all(0 < norm < 1e6 for norm in norms))


@pytest.mark.parametrize("words", [(), ("--packed",), ("--shape", "odd")], ids=["toy", "packed", "odd"])
def test_it_trains_on_the_cpu(image: BuiltImage, run_in: RunIn, words: tuple[str, ...]) -> None:
    """With a UID of its own and a read-only root, as a cluster runs it; through the reference implementations, and it says so."""
    done = run_in(
        image.reference, "blackwell", "step", "--device", "cpu", "--steps", str(STEPS), "--json", *words,
        user="23456:23456", read_only=True, tmpfs=("/tmp",), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert trained(report), report
    assert report["hits"] == report["misses"] == 0, "no Triton kernel runs on the CPU"
    assert all("reference" in name for names in report["implementations"].values() for name in names), report


def test_it_trains_on_the_card(image: BuiltImage, run_in: RunIn) -> None:
    """Where a GPU is visible. A host that has the NVIDIA driver and an engine that can't hand it on is a failure, not a reason to skip."""
    with_gpus = ("--gpus", "all")
    seen = run_in(
        image.reference, "nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader", options=with_gpus
    )
    if seen.returncode:
        assert not DRIVER.exists(), (
            f"this host has the NVIDIA driver, its engine gives no container a GPU: {seen.stderr}"
        )
        pytest.skip(
            f"no GPU here: {DRIVER} is missing, and the engine says: {(seen.stderr.strip() or '-').splitlines()[-1]}"
        )
    name, capability = (word.strip() for word in seen.stdout.splitlines()[0].rsplit(",", 1))
    if capability not in image.facts["capabilities"]:
        pytest.skip(
            f"the GPU here, {name}, has compute capability {capability}; this image is for {', '.join(image.facts['capabilities'])}"
        )
    warm = ("--expect-warm",) if name in image.facts["cards"] else ()
    done = run_in(
        image.reference, "blackwell", "step", "--device", "cuda", "--steps", str(STEPS), "--json", *warm, options=with_gpus, timeout=900
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert trained(report), report
    assert report["card"] == name
    assert report["misses"] == 0 or not warm
