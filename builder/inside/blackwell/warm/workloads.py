"""Workloads are data: TOML files that say which programs warm the caches. Standard library only."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackwell import paths


class WorkloadError(Exception):
    """A workload file is wrong or isn't there; the text names all that is wrong."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One program of a workload, run in a process of its own as a job would run it."""

    name: str
    argv: tuple[str, ...]  # the arguments of the image's Python


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Programs that together touch everything a kind of job needs."""

    name: str
    description: str
    default: bool  # warmed in every image build
    timeout: int  # seconds a run
    runs: tuple[Run, ...]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str) -> "Workload":
        """From parsed TOML. Raises WorkloadError naming everything wrong at once."""
        known = {"name": str, "description": str, "default": bool, "timeout": int, "run": list}
        wrong = [f"{key} is unknown{_hint(key, known)}" for key in content if key not in known]
        wrong += [f"{key} is missing" for key in ("name", "description", "timeout", "run") if key not in content]
        wrong += [
            f"{key} must be of type {kind.__name__}"
            for key, kind in known.items()
            if key in content and type(content[key]) is not kind
        ]
        runs = content["run"] if isinstance(content.get("run"), list) else []
        for index, run in enumerate(runs):
            argv = run.get("argv")
            if (
                set(run) != {"name", "argv"}
                or not isinstance(argv, list)
                or not argv
                or not all(isinstance(word, str) for word in argv)
            ):
                wrong.append(f"run[{index}] must have a name and argv, a list of words")
        names = [str(run.get("name")) for run in runs]
        wrong += [f"run name {name!r} is used twice" for name in sorted({n for n in names if names.count(n) > 1})]
        if isinstance(content.get("timeout"), int) and content["timeout"] < 1:
            wrong.append("timeout must be at least 1 second")
        if wrong:
            raise WorkloadError(f"workload {origin}: " + "; ".join(wrong))
        return cls(
            name=content["name"],
            description=content["description"],
            default=content.get("default", False),
            timeout=content["timeout"],
            runs=tuple(Run(name=run["name"], argv=tuple(run["argv"])) for run in runs),
        )


def _hint(word: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def load(directory: Path | None = None) -> dict[str, Workload]:
    """Every workload of the directory (default: those shipped), by name."""
    found: dict[str, Workload] = {}
    for path in sorted((directory or paths.data("workloads")).glob("*.toml")):
        workload = Workload.from_dict(tomllib.loads(path.read_text()), path.name)
        found[workload.name] = workload
    return found


def select(names: list[str], known: Mapping[str, Workload]) -> list[Workload]:
    """The named workloads, or the default ones for no name. Raises WorkloadError for an unknown name."""
    for name in names:
        if name not in known:
            raise WorkloadError(f"no workload is named {name!r}{_hint(name, known)}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else [workload for workload in known.values() if workload.default]
