"""The plan: every image that the matrix allows, and which of them a request or a selector means. Pure functions."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from itertools import product

from packaging.version import InvalidVersion, Version

from builder.checks import meant
from builder.errors import KnownBadError, SelectionError
from builder.rules import applies, facts, speaking
from builder.values import Base, Capability, Fla, Image, Matrix, Platform, RuleVerdict, Stack

STACK_AXES = ("cuda", "torch", "triton")
AXES = (*STACK_AXES, "fla", "conv1d", "python", "base")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for. Versions are prefixes by component ("3.7" is 3.7.1 and never 3.70), "" leaves an axis open.

    `capabilities` are written "12.0"; none means the default ones. `id` is an identifier and stands for all of it.
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
        return " ".join(f"{axis.upper()}={value}" for axis, value in self.asked.items()) or "nothing"


def prefixes(asked: str, version: str) -> bool:
    """Does the request mean this version: are its components the first ones of the version?"""
    wanted, have = asked.split("."), version.split(".")
    return have[: len(wanted)] == wanted


def images(matrix: Matrix, platform: Platform) -> Iterator[Image]:
    """The full plan of a platform, lazily and in the order of the matrix: all combinations but the excluded and refused ones."""
    for cell in _cells(matrix, {}, platform):
        image = _judged(matrix, cell)
        if not _refusal(image):
            yield image


def resolve(matrix: Matrix, request: Request) -> Image:
    """The one image that a request means.

    Raises SelectionError if it means none or several, KnownBadError if a rule refuses the one it means.
    """
    if request.id:
        return _only(select(matrix, request.id), request.id)
    capabilities = _capabilities(matrix, request.capabilities)
    cells = _matching(matrix, request)
    used: list[str] = []
    cells = _narrow_stacks(cells, request, used)
    for axis, default in (("fla", ""), ("conv1d", ""), ("base", "")):
        cells = _narrow(cells, axis, dict(matrix.defaults).get(axis, default), request, used)
    if not request.capabilities:
        used.append(f"capabilities {', '.join(map(str, capabilities))}: the default set")
    image = _judged(matrix, _with_capabilities(matrix, cells[0], capabilities))
    if refusal := _refusal(image):
        raise _known_bad(image.id, refusal)
    return replace(image, defaults_used=tuple(used))


def resolve_all(matrix: Matrix, request: Request) -> tuple[Image, ...]:
    """All images that a request could mean, an empty one all of them; those that a rule refuses are left out.

    Raises SelectionError if nothing matches, KnownBadError if every match is refused.
    """
    if request.id:
        return select(matrix, request.id)
    capabilities = _capabilities(matrix, request.capabilities)
    judged = [_judged(matrix, _with_capabilities(matrix, cell, capabilities)) for cell in _matching(matrix, request)]
    good = tuple(image for image in judged if not _refusal(image))
    if not good and (refusal := _refusal(judged[0])):
        raise _known_bad(str(request), refusal)
    return good


def select(matrix: Matrix, selector: str) -> tuple[Image, ...]:
    """The images of all platforms whose identifier or lock name the selector is, or whose identifier its glob matches.

    An identifier may end in capabilities (...-sm100-sm120). Raises SelectionError, with near matches, if there is none.
    """
    pattern, capabilities = selector, matrix.default_capabilities
    if suffix := re.search(r"(-sm\d+)+$", selector):
        pattern = selector[: suffix.start()]
        texts = [f"{sm[:-1]}.{sm[-1]}" for sm in re.findall(r"sm(\d+)", suffix.group())]
        capabilities = _capabilities(matrix, texts)
    fits = re.compile(translate(pattern)).match
    cells = [c for platform in matrix.platforms for c in _cells(matrix, {}, platform)]
    found = [_judged(matrix, _with_capabilities(matrix, c, capabilities)) for c in cells if fits(c.lock_name)]
    if not found:
        near = meant(selector, (c.lock_name for c in cells))
        raise SelectionError(f"no image is called {selector!r}{near}", hint="`builder list` prints all identifiers")
    good = tuple(image for image in found if not _refusal(image))
    if not good and (refusal := _refusal(found[0])):
        raise _known_bad(selector, refusal)
    return good


def _cells(matrix: Matrix, asked: Mapping[str, str], platform: Platform) -> Iterator[Image]:
    """The combinations that match, with default capabilities, without excluded ones; rules have not spoken yet."""
    stacks = [s for s in matrix.stacks if all(prefixes(asked.get(a, ""), getattr(s, a)) for a in STACK_AXES if a in asked)]
    flas = [f for f in matrix.fla if "fla" not in asked or prefixes(asked["fla"], f.version)]
    bases = [b for b in matrix.bases if asked.get("base", b.name) == b.name and prefixes(asked.get("python", b.python), b.python)]
    for base, stack, fla in product(bases, stacks, flas):
        for conv1d in [stack.conv1d] if stack.conv1d else matrix.conv1d:
            if prefixes(asked.get("conv1d", conv1d), conv1d):
                cell = _cell(matrix, base, stack, fla, conv1d, platform)
                if not matrix.excludes or not _excluded(matrix, cell):
                    yield cell


def _cell(matrix: Matrix, base: Base, stack: Stack, fla: Fla, conv1d: str, platform: Platform) -> Image:
    return Image(
        base=base,
        stack=stack,
        fla=fla,
        conv1d=conv1d,
        capabilities=matrix.default_capabilities,
        platform=platform,
        default_capabilities=True,
    )


def _excluded(matrix: Matrix, cell: Image) -> bool:
    about = facts(cell)
    return any(applies(exclude.when, about, cell.capabilities) for exclude in matrix.excludes)


def _with_capabilities(matrix: Matrix, cell: Image, capabilities: tuple[Capability, ...]) -> Image:
    return replace(cell, capabilities=capabilities, default_capabilities=capabilities == matrix.default_capabilities)


def _judged(matrix: Matrix, image: Image) -> Image:
    """The image with the rules that speak about it."""
    return replace(image, rules=speaking(matrix.rules, facts(image), image.capabilities))


def _refusal(image: Image) -> RuleVerdict | None:
    return next((rule for rule in image.rules if rule.verdict == "refuse"), None)


def _known_bad(what: str, rule: RuleVerdict) -> KnownBadError:
    return KnownBadError(f"{what} is known to be bad ({rule.id}): {rule.sentence} {rule.url}", hint=rule.instead)


def _capabilities(matrix: Matrix, texts: Iterable[str]) -> tuple[Capability, ...]:
    """Read and check the capabilities of a request; in order, each once."""
    known = {str(capability): capability for capability in matrix.capabilities}
    chosen = set()
    for text in texts:
        if text not in known:
            raise SelectionError(f"unknown capability {text!r}{meant(text, known)}", hint=f"known are {', '.join(known)}")
        chosen.add(known[text])
    return tuple(sorted(chosen)) or matrix.default_capabilities


def _only(found: tuple[Image, ...], what: str) -> Image:
    if len(found) > 1:
        raise SelectionError(f"{what!r} means {len(found)} images:\n" + "\n".join(f"  {image.id}" for image in found))
    return found[0]


def _matching(matrix: Matrix, request: Request) -> list[Image]:
    """The cells that match a request, at least one."""
    cells = list(_cells(matrix, request.asked, request.platform))
    if not cells:
        raise SelectionError(f"nothing matches {request}")
    return cells


def _narrow_stacks(cells: list[Image], request: Request, used: list[str]) -> list[Image]:
    """Keep the cells of one stack: the only one, or the one that is the default for an axis that was asked for."""
    stacks = list(dict.fromkeys(cell.stack for cell in cells))
    asked = {axis: value for axis, value in request.asked.items() if axis in STACK_AXES}
    winners = [stack for stack in stacks if set(stack.default_for) & asked.keys()]
    if not request.asked or (len(stacks) > 1 and len(winners) != 1):
        raise SelectionError(f"{request} is ambiguous")
    if len(stacks) > 1:
        stacks = winners
    return [cell for cell in cells if cell.stack == stacks[0]]


def _narrow(cells: list[Image], axis: str, default: str, request: Request, used: list[str]) -> list[Image]:
    """Keep the cells with one value of an axis: the only one, or the default."""
    values = list(dict.fromkeys(cell.versions[axis] for cell in cells))
    value = values[0] if len(values) == 1 else default
    if value not in values:
        raise SelectionError(f"{axis} is ambiguous: {', '.join(values)}")
    if len(values) > 1:
        used.append(f"{axis} {value}: the default")
    return [cell for cell in cells if cell.versions[axis] == value]
