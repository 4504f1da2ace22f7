"""Does a condition of the matrix hold for an image, and which known-bad rules speak about it? Pure functions."""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from packaging.specifiers import SpecifierSet

from builder.values import Capability, Condition, Image, Rule, RuleVerdict

# Axes whose value is a name, compared as it is; all others are versions, held against a PEP 440 specifier.
NAMED_AXES = frozenset({"base", "platform", "override"})


def facts(image: Image) -> dict[str, str]:
    """What a condition can ask about: the versions by axis, the platform, and whether the Triton is an override."""
    return {**image.versions, "platform": image.platform, "override": str(image.stack.override).lower()}


@lru_cache(maxsize=65536)
def holds(axis: str, wanted: str, value: str) -> bool:
    """Does one part of a condition hold for the value of its axis? "none" is a version of nothing and matches only itself."""
    if axis in NAMED_AXES or "none" in (wanted, value):
        return wanted == value
    return SpecifierSet(wanted).contains(value, prereleases=True)


def applies(condition: Condition, facts: Mapping[str, str], capabilities: Iterable[Capability]) -> bool:
    """Do all parts of the condition hold? A part about an axis that `facts` doesn't know never holds."""
    if not all(axis in facts and holds(axis, wanted, facts[axis]) for axis, wanted in condition.where):
        return False
    return not condition.capabilities or not set(condition.capabilities).isdisjoint(capabilities)


def speaking(
    rules: Iterable[Rule], facts: Mapping[str, str], capabilities: Iterable[Capability]
) -> tuple[RuleVerdict, ...]:
    """The verdicts of all rules that apply, refusals first."""
    asked = frozenset(capabilities)
    spoken = [
        RuleVerdict(id=r.id, verdict=r.verdict, sentence=r.sentence, url=r.url, instead=r.instead)
        for r in rules
        if applies(r.when, facts, asked)
    ]
    return tuple(sorted(spoken, key=lambda verdict: verdict.verdict != "refuse"))
