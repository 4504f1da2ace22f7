"""How an image is laid out, as data: which distribution goes into which layer, and what is pruned from it."""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Literal

# Order of installation differs from the order of matching in one point: the catch-all comes before FLA, which changes more often.
ORDER = ("cuda", "cudnn", "triton", "torch", "extensions", "python", "fla")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Layer patterns in matching order, and the requirements that every image has."""

    patterns: tuple[tuple[str, tuple[str, ...]], ...]
    runtime: tuple[str, ...]
    compiler: tuple[str, ...]
    tools: tuple[str, ...]

    def of(self, distribution: str) -> str:
        """Name of the layer that a distribution belongs to."""
        return next(name for name, patterns in self.patterns if any(fnmatchcase(distribution, p) for p in patterns))


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What is removed in the layer that brought it, and why it is dead weight.

    `glob`, under the venv's site-packages, names files; `what` says whether they go whole ("files") or lose their symbol tables and
    debug information ("symbols").
    """

    layer: str
    glob: str
    reason: str
    what: Literal["files", "symbols"] = "files"


def layers() -> Layers:
    """The layer data that ships with the builder."""
    data = tomllib.loads((resources.files(__name__) / "layers.toml").read_text(encoding="utf-8"))
    patterns = tuple((row["name"], tuple(row["patterns"])) for row in data["layers"])
    return Layers(
        patterns=patterns, runtime=tuple(data["runtime"]), compiler=tuple(data["compiler"]), tools=tuple(data["tools"])
    )


def removals() -> tuple[Removal, ...]:
    """The removals that ship with the builder."""
    data = tomllib.loads((resources.files(__name__) / "prune.toml").read_text(encoding="utf-8"))
    return tuple(Removal(**row) for row in data["removals"])
