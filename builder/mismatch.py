"""Why a request got no image: a known-bad version, an unknown one, an excluded cell, or no such combination."""

from collections.abc import Iterable, Mapping

from builder.cells import STACK_AXES, Request, cells, prefixes
from builder.checks import meant, version
from builder.errors import BuilderError, KnownBadError, SelectionError
from builder.rules import applies, facts, speaking
from builder.values import Capability, Matrix, RuleVerdict, Stack


def known_bad(what: str, rule: RuleVerdict) -> KnownBadError:
    """The error for what a rule refuses; its hint is what to use instead."""
    return KnownBadError(f"{what} is known to be bad ({rule.id}): {rule.sentence} See {rule.url}", hint=rule.instead)


def row(stack: Stack) -> str:
    """A stack as one would ask for it."""
    tail = " CONV1D=none" if stack.conv1d == "none" else ""
    return f"CUDA={stack.cuda} TORCH={stack.torch} TRITON={stack.triton}{tail}"


def lines(items: Iterable[str]) -> str:
    """One item a line, indented."""
    return "\n".join(f"  {item}" for item in items)


def nothing_matches(matrix: Matrix, request: Request) -> BuilderError:
    """The error for a request that matches no cell."""
    if request.platform not in matrix.platforms:
        return SelectionError(f"unknown platform {request.platform!r}", hint=f"known are {', '.join(matrix.platforms)}")
    if unknown := _unknown(matrix, request.asked):
        if refusal := _refused_version(matrix, request, unknown):
            return known_bad(str(request), refusal)
        problems = [
            f"unknown {axis} {request.asked[axis]!r}{meant(request.asked[axis], have)}: there is {', '.join(have)}"
            for axis, have in unknown.items()
        ]
        return SelectionError(
            "\n".join(problems), hint="to add a version, add its row to the files in matrices/ and lock it"
        )
    if out := next(cells(matrix, request.asked, request.platform, excluded=True), None):
        about = facts(out)
        reasons = [exclude.reason for exclude in matrix.excludes if applies(exclude.when, about, out.capabilities)]
        return SelectionError(
            f"{request} is left out of the plan for {request.platform}: {'; '.join(reasons)}",
            hint="ask for less: `builder list` prints what there is",
        )
    near = [stack for stack in matrix.stacks if _common(stack, request)]
    best = max((_common(stack, request) for stack in near), default=0)
    rows = [stack for stack in near if _common(stack, request) == best] or list(matrix.stacks)
    return SelectionError(
        f"no row of the matrix has {request}; these come nearest:\n" + lines(map(row, rows)),
        hint=f"for example {row(rows[0])}",
    )


def _common(stack: Stack, request: Request) -> int:
    """How many of the asked stack axes does this row have?"""
    return sum(prefixes(value, getattr(stack, axis)) for axis, value in request.asked.items() if axis in STACK_AXES)


def _unknown(matrix: Matrix, asked: Mapping[str, str]) -> dict[str, list[str]]:
    """The axes whose asked value is in no row, each with the values that there are."""
    have = {axis: sorted({getattr(stack, axis) for stack in matrix.stacks}) for axis in STACK_AXES} | {
        "fla": [fla.version for fla in matrix.fla],
        "conv1d": [*matrix.conv1d, *sorted({stack.conv1d for stack in matrix.stacks} - {""})],
        "python": [base.python for base in matrix.bases],
        "base": [base.name for base in matrix.bases],
    }
    return {
        axis: have[axis]
        for axis, value in asked.items()
        if not any(value == known if axis == "base" else prefixes(value, known) for known in have[axis])
    }


def _refused_version(matrix: Matrix, request: Request, unknown: Iterable[str]) -> RuleVerdict | None:
    """The rule that would refuse these unknown versions with everything that is there: nobody should add a row for them."""
    literal = {axis: request.asked[axis] for axis in unknown if not version(request.asked[axis])}
    rest = {axis: value for axis, value in request.asked.items() if axis not in literal}
    capabilities = [Capability.parse(text) for text in request.capabilities] or matrix.default_capabilities
    found = None
    for cell in cells(matrix, rest, request.platform):
        spoken = speaking(matrix.rules, {**facts(cell), **literal}, capabilities)
        found = next((rule for rule in spoken if rule.verdict == "refuse"), None)
        if not found:
            return None
    return found
