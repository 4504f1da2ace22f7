"""The plan: every image that the matrix allows, and which of them a request or a selector means. Pure functions."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import translate

from builder.cells import STACK_AXES, Request, cells
from builder.checks import meant
from builder.errors import SelectionError
from builder.mismatch import known_bad, lines, nothing_matches, row
from builder.rules import facts, speaking
from builder.values import Capability, Image, Matrix, Platform, RuleVerdict

__all__ = ["Request", "images", "resolve", "resolve_all", "select"]


def images(matrix: Matrix, platform: Platform) -> Iterator[Image]:
    """The full plan of a platform, lazily and in the order of the matrix, without excluded and refused images."""
    for cell in cells(matrix, {}, platform):
        image = _judged(matrix, cell)
        if not _refusal(image):
            yield image


def resolve(matrix: Matrix, request: Request) -> Image:
    """The one image that a request means; its `defaults_used` say how the open axes were decided.

    Raises SelectionError if the request means no image or several, KnownBadError if a rule refuses the one it means.
    """
    capabilities = _capabilities(matrix, request.capabilities)
    used: list[str] = []
    if request.id:
        image = _single(matrix, request)
        capabilities = capabilities if request.capabilities else image.capabilities
    else:
        matching = _default_stack(_matching(matrix, request), request, used)
        for axis in ("fla", "conv1d", "base"):
            matching = _default_value(matching, axis, dict(matrix.defaults)[axis], request, used)
        image = matching[0]
        if not request.capabilities:
            used.append(f"capabilities {', '.join(map(str, capabilities))} by default")
    image = _judged(matrix, image, capabilities)
    if refusal := _refusal(image):
        raise known_bad(image.id, refusal)
    return replace(image, defaults_used=tuple(used))


def resolve_all(matrix: Matrix, request: Request) -> tuple[Image, ...]:
    """All images that a request could mean, an empty one every image; those that a rule refuses are left out.

    Raises SelectionError if nothing matches, KnownBadError if every match is refused.
    """
    if request.id:
        return (resolve(matrix, request),)
    capabilities = _capabilities(matrix, request.capabilities)
    return _allowed([_judged(matrix, cell, capabilities) for cell in _matching(matrix, request)], str(request))


def select(matrix: Matrix, selector: str) -> tuple[Image, ...]:
    """The images of all platforms whose identifier or lock name the selector is, or whose identifier its glob matches.

    A selector may end in capabilities (...-sm100-sm120), as identifiers of images without the default ones do.
    Raises SelectionError, with near matches, if there is none, and KnownBadError if every one is refused.
    """
    name, capabilities = selector, matrix.default_capabilities
    if suffix := re.search(r"(-sm\d{2,})+$", selector):
        name = selector[: suffix.start()]
        capabilities = _capabilities(matrix, [f"{sm[:-1]}.{sm[-1]}" for sm in re.findall(r"\d+", suffix.group())])
    fits = re.compile(translate(name)).match
    named = [(cell, cell.lock_name) for platform in matrix.platforms for cell in cells(matrix, {}, platform)]
    found = [_judged(matrix, cell, capabilities) for cell, lock_name in named if fits(lock_name)]
    if not found:
        near = meant(name, (lock_name for _, lock_name in named))
        raise SelectionError(f"no image is called {selector!r}{near}", hint="`builder list` prints all identifiers")
    return _allowed(found, selector)


def _judged(matrix: Matrix, cell: Image, capabilities: tuple[Capability, ...] = ()) -> Image:
    """The cell for some capabilities (or its own), with the rules that speak about it."""
    chosen = capabilities or cell.capabilities
    return replace(
        cell,
        capabilities=chosen,
        default_capabilities=chosen == matrix.default_capabilities,
        rules=speaking(matrix.rules, facts(cell), chosen),
    )


def _refusal(image: Image) -> RuleVerdict | None:
    return next((rule for rule in image.rules if rule.verdict == "refuse"), None)


def _allowed(judged: list[Image], what: str) -> tuple[Image, ...]:
    """Those that no rule refuses, at least one."""
    good = tuple(image for image in judged if not _refusal(image))
    if not good and (refusal := _refusal(judged[0])):
        raise known_bad(what, refusal)
    return good


def _capabilities(matrix: Matrix, texts: Iterable[str]) -> tuple[Capability, ...]:
    """Read and check capabilities, in order and each once; the default ones if there are none."""
    known = {str(capability): capability for capability in matrix.capabilities}
    asked = list(texts)
    if wrong := [text for text in asked if text not in known]:
        raise SelectionError(
            f"unknown capability {', '.join(map(repr, wrong))}{meant(wrong[0], known)}",
            hint=f"known are {', '.join(known)}",
        )
    return tuple(sorted({known[text] for text in asked})) or matrix.default_capabilities


def _single(matrix: Matrix, request: Request) -> Image:
    """The one image that the request's identifier names."""
    if request.asked:
        raise SelectionError(f"{request.id} decides all versions already", hint=f"leave out {request}")
    found = select(matrix, request.id)
    if len(found) > 1:
        raise SelectionError(
            f"{request.id} means {len(found)} images:\n" + lines(image.id for image in found), hint="name one"
        )
    return found[0]


def _matching(matrix: Matrix, request: Request) -> list[Image]:
    """The cells that match a request, at least one."""
    matching = list(cells(matrix, request.asked, request.platform)) if request.platform in matrix.platforms else []
    if not matching:
        raise nothing_matches(matrix, request)
    return matching


def _default_stack(matching: list[Image], request: Request, used: list[str]) -> list[Image]:
    """Keep the cells of one stack: the only one, or the one that is the default for an axis that was asked for."""
    stacks = list(dict.fromkeys(cell.stack for cell in matching))
    asked = {axis: value for axis, value in request.asked.items() if axis in STACK_AXES}
    winners = [stack for stack in stacks if asked.keys() & set(stack.default_for)]
    if not request.asked or (len(stacks) > 1 and len(winners) != 1):
        raise SelectionError(
            f"{request} does not say which row:\n" + lines(map(row, stacks)),
            hint=f"ask for one of these, for example {row((winners or stacks)[0])}",
        )
    stack = winners[0] if len(stacks) > 1 else stacks[0]
    if len(stacks) > 1:
        why = ", ".join(f"{axis} {asked[axis]}" for axis in asked if axis in stack.default_for)
        used.append(f"{row(stack)} is the default row for {why}, out of {len(stacks)}")
    if stack.override:
        used.append(f"Triton {stack.triton} overrides torch's own {stack.triton_pin}: {stack.reason}")
    return [cell for cell in matching if cell.stack == stack]


def _default_value(matching: list[Image], axis: str, default: str, request: Request, used: list[str]) -> list[Image]:
    """Keep the cells with one value of an axis: the only one, or the default."""
    values = list(dict.fromkeys(cell.versions[axis] for cell in matching))
    value = values[0] if len(values) == 1 else default
    if value not in values:
        raise SelectionError(
            f"{request} could mean {axis} {' or '.join(values)}",
            hint=f"say which, for example {axis.upper()}={values[0]}",
        )
    if axis not in request.asked and not (axis == "base" and request.python):
        used.append(
            f"{axis} {value} by default" if value == default else f"{axis} {value}, the only one that goes with it"
        )
    elif len(values) > 1:
        used.append(f"{axis} {value} by default, out of {', '.join(values)}")
    return [cell for cell in matching if cell.versions[axis] == value]
