"""Requests, and the cells of the matrix that they match: the combinations of its axes, before any rule speaks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from builder.rules import applies, facts
from builder.values import Image, Matrix, Platform

STACK_AXES = ("cuda", "torch", "triton")
AXES = (*STACK_AXES, "fla", "conv1d", "python", "base")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for. Versions are prefixes by component ("3.7" is 3.7.1 and never 3.70), "" leaves an axis open.

    `capabilities` are written "12.0"; none means the default ones. `id` is an identifier and stands for all versions.
    """

    triton: str = ""
    torch: str = ""
    cuda: str = ""
    fla: str = ""
    conv1d: str = ""
    python: str = ""
    base: str = ""
    capabilities: tuple[str, ...] = ()
    platform: Platform = "linux/amd64"
    id: str = ""

    @property
    def asked(self) -> dict[str, str]:
        """The axes that the request says something about."""
        return {axis: value for axis in AXES if (value := getattr(self, axis))}

    def __str__(self) -> str:
        return (
            " ".join(f"{axis.upper()}={value}" for axis, value in self.asked.items()) or self.id or "an empty request"
        )


def prefixes(asked: str, version: str) -> bool:
    """Does the request mean this version: are its components the first ones of the version?"""
    wanted, have = asked.split("."), version.split(".")
    return have[: len(wanted)] == wanted


def cells(matrix: Matrix, asked: Mapping[str, str], platform: Platform, *, excluded: bool = False) -> Iterator[Image]:
    """The combinations that match, with default capabilities and before any rule, except the excluded ones (or only those)."""

    def fits(axis: str, value: str) -> bool:
        return axis not in asked or prefixes(asked[axis], value)

    stacks = [s for s in matrix.stacks if fits("cuda", s.cuda) and fits("torch", s.torch) and fits("triton", s.triton)]
    flas = [f for f in matrix.fla if fits("fla", f.version)]
    bases = [b for b in matrix.bases if asked.get("base", b.name) == b.name and fits("python", b.python)]
    conv1ds = [c for c in (*matrix.conv1d, "none") if fits("conv1d", c)]
    for base, stack, fla, conv1d in product(bases, stacks, flas, conv1ds):
        if (conv1d == "none") != (stack.conv1d == "none"):
            continue
        cell = Image(
            base=base,
            stack=stack,
            fla=fla,
            conv1d=conv1d,
            capabilities=matrix.default_capabilities,
            platform=platform,
            default_capabilities=True,
        )
        about = facts(cell) if matrix.excludes else {}
        if excluded == any(applies(exclude.when, about, cell.capabilities) for exclude in matrix.excludes):
            yield cell
