"""Checks of single values and tables of the matrix files.

A check answers with what is wrong, or with an empty string. Problems inside of a list or table are a line each, and begin
with the rest of the path ("[2]: ...", ".name: ...").
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from builder.values import Capability

Check = Callable[[Any], str]

LONGEST_VERSION = 24  # an identifier holds five of them and has to fit into a tag (128)
LONGEST_SPECIFIER = 200
_PATH = re.compile(r"\.\w|\[\d+\][:.\[]")  # how a problem within a list or table begins; a shown list begins otherwise


def shown(value: Any) -> str:
    """A value as an error shows it: short, on one line, whatever it is."""
    try:
        words = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; something too deep
        words = f"a {type(value).__name__} too large to show"
    return words if len(words) <= 100 else f"{words[:97]}..."


def text(value: Any) -> str:
    """A string that says something."""
    return "" if isinstance(value, str) and value.strip() else f"must be a non-empty string, not {shown(value)}"


def version(value: Any) -> str:
    """A version as a string: numbers would lose the zero of "3.10"."""
    if not isinstance(value, str):
        return f"must be a version in quotes, not {shown(value)}"
    try:
        spelt = str(Version(value)) if len(value) <= LONGEST_VERSION else ""
    except InvalidVersion:
        spelt = ""
    if not spelt:
        return f"{shown(value)} is no version"
    if "+" in spelt or "!" in spelt:  # neither an identifier nor a tag can hold them
        return f"{value!r} has a local part or an epoch: name the release alone"
    return "" if spelt == value else f"{value!r} must be spelt {spelt!r}, as the package index does"


def specifier(value: Any) -> str:
    """A PEP 440 specifier, or "none" for an axis that can be absent."""
    if not isinstance(value, str) or not value.strip():
        return f"must be a version specifier such as '>=3.6,<3.8', not {shown(value)}"
    if len(value) > LONGEST_SPECIFIER:
        return f"{shown(value)} is no version specifier such as '>=3.6,<3.8'"
    try:
        SpecifierSet("" if value == "none" else value)
    except InvalidSpecifier:
        return f"{shown(value)} is no version specifier such as '>=3.6,<3.8'"
    return ""


def capability(value: Any) -> str:
    """A compute capability such as "12.0"."""
    if not isinstance(value, str):
        return f"must be a compute capability in quotes, not {shown(value)}"
    try:
        Capability.parse(value)
    except ValueError as error:
        return str(error)
    return ""


def boolean(value: Any) -> str:
    """true or false."""
    return "" if isinstance(value, bool) else f"must be true or false, not {shown(value)}"


def size(value: Any) -> str:
    """A positive number of bytes."""
    good = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return "" if good else f"must be a positive number of bytes, not {shown(value)}"


def matching(pattern: str, meaning: str) -> Check:
    """A string that matches the whole pattern; `meaning` says what it would be then."""

    def check(value: Any) -> str:
        return "" if isinstance(value, str) and re.fullmatch(pattern, value) else f"{shown(value)} is not {meaning}"

    return check


def one_of(words: Iterable[str]) -> Check:
    """One of a few words."""
    known = tuple(words)

    def check(value: Any) -> str:
        return "" if value in known else f"{shown(value)} is not one of {', '.join(known)}{meant(value, known)}"

    return check


def listing(check_item: Check) -> Check:
    """A list with at least one item, without duplicates, whose items all pass."""

    def check(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return f"must be a list with something in it, not {shown(value)}"
        wrong = [f"[{i}]: {problem}" for i, item in enumerate(value) if (problem := check_item(item))]
        return "\n".join(
            wrong + [f"[{i}]: {shown(item)} is there twice" for i, item in enumerate(value) if item in value[:i]]
        )

    return check


def table(path: str, value: Any, required: Mapping[str, Check], optional: Mapping[str, Check]) -> list[str]:
    """Problems of one table, each with its path: missing keys, unknown keys, wrong values."""
    if not isinstance(value, Mapping):
        return [f"{path}: must be a table, not {shown(value)}"]
    prefix = f"{path}." if path else ""
    known = {**required, **optional}
    found = [f"{prefix}{key}: unknown key{meant(key, known)}" for key in value if key not in known]
    found += [f"{prefix}{key}: is missing" for key in required if key not in value]
    for key, check in known.items():
        problems = check(value[key]).splitlines() if key in value else []
        found += [
            f"{prefix}{key}{problem}" if _PATH.match(problem) else f"{prefix}{key}: {problem}" for problem in problems
        ]
    return found


def meant(word: Any, known: Iterable[str]) -> str:
    """A suggestion for a typo, to be put at the end of a sentence, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
