"""What a check answers, and what all checks may look at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blackwell.doctor.gpus import GpuReport


class Verdict(StrEnum):
    """How a check ended, best first."""

    PASS = "pass"
    SKIP = "skip"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's answer: `saw` is a fact (or the reason of a skip), `todo` says what to do about it."""

    verdict: Verdict
    saw: str
    todo: str = ""


def passed(saw: str) -> Finding:
    """All is well."""
    return Finding(verdict=Verdict.PASS, saw=saw)


def skipped(why: str) -> Finding:
    """Not judged, and why."""
    return Finding(verdict=Verdict.SKIP, saw=why)


def warned(saw: str, todo: str) -> Finding:
    """Training works, but slower or with less safety than this image can give."""
    return Finding(verdict=Verdict.WARN, saw=saw, todo=todo)


def failed(saw: str, todo: str) -> Finding:
    """Training can't work here, or computes something else than it should."""
    return Finding(verdict=Verdict.FAIL, saw=saw, todo=todo)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the import probe: `facts` when it worked, else `error`.

    `slow`: it was still running when time was up. Not `reached`: an earlier stage took all the time or ended the probe.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    slow: bool = False
    reached: bool = True


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was found out once and is shared by the checks."""

    environment: Mapping[str, str]
    facts: Mapping[str, Any] | None = None
    """image.json, None when it can't be read."""
    facts_problem: str = ""
    judge_gpu: bool = True
    """False with --no-gpu: judge the image alone."""
    gpus: GpuReport = field(default_factory=GpuReport)
    imports: Mapping[str, Stage] = field(default_factory=dict)

    def version(self, name: str) -> str | None:
        """The version that image.json gives for "torch", "triton", ...; None when it doesn't say."""
        versions = (self.facts or {}).get("versions", {})
        value = versions.get(name)
        return str(value) if value else None


@dataclass(frozen=True, kw_only=True)
class Check:
    """A named check. `needs` names the shared probes ("gpus", "imports") that must have ended before it can start."""

    name: str
    function: Callable[[Seen], Finding]
    needs: frozenset[str] = frozenset()
    quick: bool = False
    """Also part of `doctor --quick`: answers in milliseconds."""
    seconds: float = 3.0
    """Bound. What takes longer is killed and reported."""
