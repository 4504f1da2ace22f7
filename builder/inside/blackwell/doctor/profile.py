"""Write the profile of the real card in this machine, for the null GPU to stand in for it elsewhere."""

import importlib
import importlib.util
import os
from pathlib import Path

from blackwell.doctor import bounded, gpus
from blackwell.doctor.checks_gpu import null_gpu
from blackwell.output import say

SECONDS = 20.0


def write_profile(file: str) -> int:
    """Write to `file` ("-" is stdout); 1 with a reason when there is no real card to describe."""
    if on := null_gpu(os.environ):
        say(f"doctor: no profile: the null GPU is on ({on}), and a profile describes a real card. Unset it.")
        return 1
    outcome = bounded.run(gpus.look, 10.0)
    report = outcome.reports[-1] if outcome.reports else gpus.GpuReport()
    if not report.by_cuda:
        why = "; ".join(f"{source}: {text}" for source, text in report.problems.items()) or outcome.problem or "no GPU"
        say(f"doctor: no profile: CUDA sees no GPU here ({why}). Run it on a machine with the card.")
        return 1
    if importlib.util.find_spec("blackwell.nullgpu") is None:
        say("doctor: no profile: blackwell.nullgpu is not installed beside this doctor.")
        return 1
    nullgpu = importlib.import_module("blackwell.nullgpu")
    driver = report.driver or "of unknown version"
    outcome = bounded.run(
        lambda report: report(nullgpu.profile_toml(nullgpu.dump_profile(note=f"NVIDIA driver {driver}"))), SECONDS
    )
    if not outcome.reports:
        say(f"doctor: no profile: the card could not be read: {outcome.problem}")
        return 1
    text = str(outcome.reports[-1])
    if file == "-":
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        Path(file).write_text(text)
        say(f"doctor: wrote {file}")
    return 0
