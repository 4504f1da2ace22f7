"""Data files of the code inside images that the host reads too: which named cards have a capability."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from builder.values import Capability


def cards_for(inside: Path, capabilities: Sequence[Capability]) -> tuple[str, ...]:
    """Names of the cards, as the NVIDIA driver reports them, whose capability is among the given ones."""
    names = []
    for path in sorted((inside / "blackwell" / "cards").glob("*.toml")):
        card = tomllib.loads(path.read_text(encoding="utf-8"))
        attributes = card["attributes"]
        capability = Capability(
            major=attributes["compute_capability_major"], minor=attributes["compute_capability_minor"]
        )
        if capability in capabilities:
            names.append(str(card["name"]))
    return tuple(names)
