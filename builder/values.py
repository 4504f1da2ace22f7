"""The frozen values that travel between the rooms: what the matrix says, what a plan chose, what a lock pins.

Versions are strings as the package index spells them; capabilities are written as NVIDIA writes them ("12.0").
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import total_ordering
from typing import Any, Literal

Platform = Literal["linux/amd64", "linux/arm64"]
Verdict = Literal["refuse", "warn", "note"]


@total_ordering
@dataclass(frozen=True, kw_only=True)
class Capability:
    """A CUDA compute capability, for example 12.0."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> "Capability":
        """Read "12.0". Raises ValueError for anything else."""
        major, dot, minor = text.partition(".")
        if not (dot and major.isdigit() and minor.isdigit()):
            raise ValueError(f"{text!r} is no compute capability such as '12.0'")
        return cls(major=int(major), minor=int(minor))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def __lt__(self, other: "Capability") -> bool:
        return (self.major, self.minor) < (other.major, other.minor)

    @property
    def sm(self) -> str:
        """The name of the real architecture, for example "sm_120"."""
        return f"sm_{self.major}{self.minor}"


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base image: Debian bootstrapped by us (`suite`), or somebody's image by digest (`reference`).

    `python` is the major.minor of the Python that it brings; `packages` are the Debian packages put into a bootstrapped
    base. A base by reference must bring that Python with its headers, and a C++ compiler.
    """

    name: str
    python: str
    suite: str = ""
    reference: str = ""
    components: tuple[str, ...] = ("main",)
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A torch with the CUDA and the Triton that go with it; `triton` differs from `triton_pin` for an override row.

    `default_for` names the axes for which this row answers an open request, `reason` says why an override is wanted:
    both choose and explain, neither changes a pin. `budget_zstd_bytes` is this row's own size budget, 0 where the matrix's holds.
    """

    cuda: str
    torch: str
    triton: str
    triton_pin: str
    driver_floor: str
    toolkit: tuple[str, ...] = ()
    devel_image: str = ""
    conv1d: str = ""
    default_for: tuple[str, ...] = ()
    reason: str = ""
    budget_zstd_bytes: int = 0

    @property
    def override(self) -> bool:
        """Is this Triton another than the one that torch pins?"""
        return self.triton != self.triton_pin


@dataclass(frozen=True, kw_only=True)
class Fla:
    """A release of fla-core and flash-linear-attention with the transformers that its models are used with."""

    version: str
    transformers: str


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a rule or an exclude speaks about: every part must hold.

    `where` pairs an axis with a PEP 440 specifier for versions ("conv1d" also knows "none"), with a name for "base" and
    "platform", and with "true" or "false" for "override". `capabilities` holds when the image has at least one of them.
    """

    where: tuple[tuple[str, str], ...] = ()
    capabilities: tuple[Capability, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A known-bad combination: when it applies, what follows, and what to use instead."""

    id: str
    when: Condition
    verdict: Verdict
    sentence: str
    url: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class Exclude:
    """Cells that the plan leaves out."""

    when: Condition
    reason: str


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The whole version matrix, checked. `defaults` pairs the axes "base", "fla" and "conv1d" with a value.

    `budget` is the most bytes that an image may have with zstd-compressed layers.
    """

    bases: tuple[Base, ...]
    stacks: tuple[Stack, ...]
    fla: tuple[Fla, ...]
    conv1d: tuple[str, ...]
    capabilities: tuple[Capability, ...]
    default_capabilities: tuple[Capability, ...]
    platforms: tuple[Platform, ...]
    defaults: tuple[tuple[str, str], ...]
    budget: int
    excludes: tuple[Exclude, ...] = ()
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RuleVerdict:
    """A known-bad rule that spoke about an image."""

    id: str
    verdict: Verdict
    sentence: str
    url: str
    instead: str


@dataclass(frozen=True, kw_only=True)
class Image:
    """One cell of the plan: everything about it is decided. `conv1d` is "none" for a row without causal-conv1d."""

    base: Base
    stack: Stack
    fla: Fla
    conv1d: str
    capabilities: tuple[Capability, ...]
    platform: Platform
    default_capabilities: bool
    rules: tuple[RuleVerdict, ...] = ()
    defaults_used: tuple[str, ...] = ()

    @property
    def lock_name(self) -> str:
        """Stem of the lock: everything but the capabilities, which change no pin."""
        cuda = "cu" + "".join(self.stack.cuda.split(".")[:2])
        python = "py" + self.base.python.replace(".", "")
        conv1d = "noconv1d" if self.conv1d == "none" else f"conv1d{self.conv1d}"
        stem = f"{cuda}-torch{self.stack.torch}-triton{self.stack.triton}-fla{self.fla.version}-{conv1d}-{python}-{self.base.name}"
        return stem if self.platform == "linux/amd64" else f"{stem}-{self.platform.removeprefix('linux/')}"

    @property
    def id(self) -> str:
        """The identifier: selector key, log name, pytest id and tag."""
        return (
            self.lock_name
            if self.default_capabilities
            else f"{self.lock_name}-{'-'.join(c.sm.replace('_', '') for c in self.capabilities)}"
        )

    @property
    def tag(self) -> str:
        """Local name of the image."""
        return f"blackwell:{self.id}"

    @property
    def versions(self) -> dict[str, str]:
        """Version by axis."""
        return {
            "cuda": self.stack.cuda,
            "torch": self.stack.torch,
            "triton": self.stack.triton,
            "fla": self.fla.version,
            "conv1d": self.conv1d,
            "transformers": self.fla.transformers,
            "python": self.base.python,
            "base": self.base.name,
        }

    @property
    def warnings(self) -> tuple[RuleVerdict, ...]:
        """The rules that warn: neither refusals nor notes."""
        return tuple(r for r in self.rules if r.verdict == "warn")

    @property
    def arch(self) -> str:
        """Debian's name of the processor architecture."""
        return self.platform.removeprefix("linux/")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A Python distribution pinned by the lock; `layer` says in which image layer it is installed."""

    name: str
    version: str
    hashes: tuple[str, ...]
    layer: str


@dataclass(frozen=True, kw_only=True)
class DebianPackage:
    """A Debian package of the base, as dpkg spells name and version."""

    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Everything that a build may install.

    `inputs` is the checksum of what the lock was made from; `epoch` (seconds, UTC) is when it was made, and is the one time
    stamp that images built from it carry.
    """

    name: str
    inputs: str
    epoch: int
    platform: str
    base: str
    debian: tuple[DebianPackage, ...]
    distributions: tuple[Distribution, ...]

    @property
    def checksum(self) -> str:
        """Checksum of the lock's content."""
        return checksum(asdict(self))

    def layer(self, name: str) -> tuple[Distribution, ...]:
        """The distributions of one layer, in name order."""
        return tuple(d for d in self.distributions if d.layer == name)

    def version(self, name: str) -> str | None:
        """Locked version of a distribution that the runtime image has, or None."""
        return next(
            (d.version for d in self.distributions if d.name == name and d.layer not in ("tools", "compiler")), None
        )


def checksum(value: Any) -> str:
    """sha256 of a value's canonical JSON, as "sha256:<hex>"."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
