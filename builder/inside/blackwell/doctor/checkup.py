"""Run all checks with their bounds: shared probes and independent checks at once, then those that need the probes."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blackwell import paths
from blackwell.doctor import bounded, checks_cache, checks_gpu, checks_machine, checks_software, gpus, imports, peers
from blackwell.doctor.finding import Check, Finding, Seen, Stage, Verdict, failed, skipped, warned
from blackwell.doctor.gpus import GpuReport

LIMIT_WITHOUT_GPU = 9.5
LIMIT_WITH_GPU = 29.0
LIMIT_QUICK = 2.0
"""Seconds for everything; a little is left for starting and printing."""

GPU_PROBE = 5.0
"""Seconds for NVML and cuInit: without persistence mode a large machine needs some."""

RESERVE = 0.5
"""Seconds kept for the checks that wait for the import probe."""


def peer_to_peer(seen: Seen) -> Finding:
    """With two or more GPUs: do they talk to each other rightly?"""
    count = len(seen.gpus.gpus)
    if not seen.judge_gpu or count < 2:
        return skipped("not judged: --no-gpu" if not seen.judge_gpu else f"{count} GPU: nothing to compare")
    if checks_gpu.null_gpu(seen.environment):
        return skipped("the null GPU moves no data")
    if (torch := seen.imports.get("torch")) is None or torch.error:
        return skipped("torch doesn't import")
    return peers.judge(*peers.measure(count, PEERS_SECONDS))


PEERS_SECONDS = 17.0
_NEEDS_GPUS = frozenset({"gpus"})
_NEEDS_IMPORTS = frozenset({"gpus", "imports"})

CHECKS: tuple[Check, ...] = (
    Check(name="image", function=checks_machine.image, quick=True),
    Check(name="known-bad", function=checks_machine.known_bad, quick=True),
    Check(name="driver", function=checks_gpu.driver, needs=_NEEDS_GPUS, quick=True),
    Check(name="libcuda", function=checks_gpu.libcuda, needs=_NEEDS_GPUS, quick=True),
    Check(name="forward-compat", function=checks_gpu.forward_compat, needs=_NEEDS_GPUS, quick=True),
    Check(name="gpus", function=checks_gpu.gpus, needs=_NEEDS_GPUS, quick=True),
    Check(name="capability", function=checks_gpu.capability, needs=_NEEDS_GPUS, quick=True),
    Check(name="card", function=checks_gpu.card, needs=_NEEDS_GPUS, quick=True),
    Check(name="nvidia-variables", function=checks_gpu.nvidia_variables, needs=_NEEDS_GPUS, quick=True),
    Check(name="preload", function=checks_gpu.preload, quick=True),
    Check(name="python", function=checks_machine.python, quick=True),
    Check(name="ldconfig", function=checks_machine.ldconfig, needs=_NEEDS_GPUS, quick=True),
    Check(name="compiler", function=checks_machine.compiler, quick=True),
    Check(name="shared-memory", function=checks_machine.shared_memory, quick=True),
    Check(name="distributions", function=checks_software.distributions),
    Check(name="pip-constraint", function=checks_software.pip_constraint, quick=True),
    Check(name="triton", function=checks_software.triton, needs=_NEEDS_IMPORTS),
    Check(name="torch", function=checks_software.torch, needs=_NEEDS_IMPORTS),
    Check(name="fla", function=checks_software.fla, needs=_NEEDS_IMPORTS),
    Check(name="conv1d", function=checks_software.conv1d, needs=_NEEDS_IMPORTS),
    Check(name="transformers", function=checks_software.transformers, needs=_NEEDS_IMPORTS),
    Check(name="cache-used", function=checks_cache.cache_used, quick=True),
    Check(name="cache-fingerprint", function=checks_cache.fingerprint, seconds=6),
    Check(name="cache-integrity", function=checks_cache.integrity, seconds=8.5),
    Check(name="cache-writable", function=checks_cache.writable, quick=True),
    Check(name="cache-storage", function=checks_cache.network_storage, quick=True),
    Check(name="assembler", function=checks_machine.assembler, quick=True),
    Check(name="key-variables", function=checks_machine.key_variables, quick=True),
    Check(name="triton-variables", function=checks_machine.triton_variables, needs=_NEEDS_IMPORTS),
    Check(name="fla-variables", function=checks_machine.fla_variables, quick=True),
    Check(name="peer-to-peer", function=peer_to_peer, needs=_NEEDS_IMPORTS, seconds=PEERS_SECONDS + 1),
)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A check's name, its answer, and the seconds it took."""

    name: str
    finding: Finding
    seconds: float


def verdict(answers: Iterable[Checked]) -> Verdict:
    """The worst of all; skipped checks don't count."""
    found = {answer.finding.verdict for answer in answers}
    return next((v for v in (Verdict.FAIL, Verdict.WARN) if v in found), Verdict.PASS)


def check_up(*, quick: bool = False, judge_gpu: bool = True, limit: float | None = None) -> list[Checked]:
    """All checks, in the order of CHECKS. Ends in time whatever hangs; `limit` (seconds) replaces the usual one."""
    begin = time.monotonic()
    checks = [check for check in CHECKS if check.quick or not quick]
    seen = _image(Seen(environment=dict(os.environ), judge_gpu=judge_gpu))
    usual = LIMIT_QUICK if quick else LIMIT_WITHOUT_GPU
    total = limit or usual
    scale = max(1.0, total / usual)  # who gives more time, on a slow machine, gives it to every check
    answers: dict[str, Checked] = {}

    import_probe = None if quick else bounded.start(imports.look)
    try:
        gpu_probe = bounded.start(gpus.look)
        independent = [check for check in checks if not check.needs]
        children = [_start(check, seen) for check in independent]
        seen = replace(seen, gpus=_gpu_report(bounded.collect([gpu_probe], [min(GPU_PROBE * scale, total * 0.6)])[0]))
        if seen.gpus.gpus and limit is None and not quick and judge_gpu:
            total = LIMIT_WITH_GPU
        left = total - (time.monotonic() - begin)
        answers |= _answers([c for c in checks if c.needs == _NEEDS_GPUS], None, seen, scale, left)
        answers |= _answers(independent, children, seen, scale, total)
        if import_probe is not None:
            several = len(seen.gpus.gpus) > 1 and judge_gpu
            bound = total - RESERVE - (PEERS_SECONDS if several else 0.0)
            seen = replace(seen, imports=_stages(bounded.collect([import_probe], [max(bound, 1.0)])[0]))
            import_probe = None
            left = total - (time.monotonic() - begin)
            answers |= _answers([c for c in checks if c.needs == _NEEDS_IMPORTS], None, seen, scale, left)
    finally:
        if import_probe is not None:
            bounded.collect([import_probe], [0.0])
    return [answers[check.name] for check in checks]


def _image(seen: Seen) -> Seen:
    try:
        return replace(seen, facts=paths.image_facts())
    except (OSError, ValueError) as problem:
        return replace(seen, facts_problem=str(problem))


def _start(check: Check, seen: Seen) -> bounded.Running:
    def answer(report: Callable[[Any], None]) -> None:
        report(check.function(seen))

    return bounded.start(answer)


def _answers(
    checks: Sequence[Check], children: Sequence[bounded.Running] | None, seen: Seen, scale: float, left: float
) -> Mapping[str, Checked]:
    """Collect started checks, or start them now, each within its bound and none beyond `left` seconds."""
    running = children if children is not None else [_start(check, seen) for check in checks]
    outcomes = bounded.collect(running, [max(0.2, min(check.seconds * scale, left)) for check in checks])
    return {check.name: _checked(check, outcome) for check, outcome in zip(checks, outcomes, strict=True)}


def _checked(check: Check, outcome: bounded.Outcome) -> Checked:
    if outcome.reports:
        finding: Finding = outcome.reports[-1]
    elif outcome.problem.startswith("no answer"):
        finding = warned(
            f"this check gave {outcome.problem}", "something here hangs or is very slow; --limit gives it more time"
        )
    else:
        finding = failed(
            f"this check could not run: {outcome.problem}",
            "please report it with the output of `blackwell doctor --json`",
        )
    return Checked(name=check.name, finding=finding, seconds=outcome.seconds)


def _gpu_report(outcome: bounded.Outcome) -> GpuReport:
    """The last report of the probe; what it met after that (a hang, a crash) becomes a problem of the next source."""
    report: GpuReport = outcome.reports[-1] if outcome.reports else GpuReport()
    if not outcome.problem:
        return report
    source = ("proc", "nvml", "cuda")[min(len(outcome.reports), 2)]
    return replace(report, problems={**report.problems, source: outcome.problem})


def _stages(outcome: bounded.Outcome) -> dict[str, Stage]:
    """The import probe's reports by stage; the one it died in, and all after it, say so."""
    ended: dict[str, Stage] = {}
    begun: set[str] = set()
    for kind, stage, *rest in outcome.reports:
        begun.add(stage)
        if kind == "facts":
            ended[stage] = Stage(facts=rest[0])
        elif kind == "error":
            ended[stage] = Stage(error=rest[0])
    for stage in imports.STAGES:
        if stage not in ended:
            problem = outcome.problem or "no report"
            if stage in begun:
                ended[stage] = Stage(error=problem, slow=problem.startswith("no answer"))
            else:
                ended[stage] = Stage(error=f"the imports before it ended the probe ({problem})", reached=False)
    return ended


def image_identifier() -> str | None:
    """The image's identifier, None outside an image."""
    facts = _image(Seen(environment={})).facts
    return str(facts["id"]) if facts and "id" in facts else None
