"""How an image is laid out, as data: which distribution goes into which layer, and what is pruned from it."""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources

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
    """Files that are removed in the layer that brought them: a glob under the venv's site-packages, and why they are dead weight."""

    layer: str
    glob: str
    reason: str


def layers() -> Layers:
    """The layer data that ships with the builder."""
    data = tomllib.loads((resources.files(__name__) / "layers.toml").read_text())
    patterns = tuple((row["name"], tuple(row["patterns"])) for row in data["layers"])
    return Layers(
        patterns=patterns, runtime=tuple(data["runtime"]), compiler=tuple(data["compiler"]), tools=tuple(data["tools"])
    )


def removals() -> tuple[Removal, ...]:
    """The removals that ship with the builder."""
    data = tomllib.loads((resources.files(__name__) / "prune.toml").read_text())
    return tuple(Removal(**row) for row in data["removals"])
