"""Measured autotune choices as data: written by `blackwell tune` on a card, merged, and preferred by a build. Standard library only.

A bundle is JSON: {"format": 1, "entries": [{"card", "capability", "triton", "torch", "kernel", "key", "configs": [{"config", "ms"}]}]}.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
SUFFIX = ".autotune.json"


class BundleError(Exception):
    """A bundle can't be used; the text says what is wrong in it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The measured times of one autotuned kernel for one tuning key on one card."""

    card: str  # as the NVIDIA driver reports it
    capability: str
    triton: str
    torch: str
    kernel: str
    key: tuple[Any, ...]  # Triton's tuning key: values of the key arguments, then the tensors' types
    configs: tuple[tuple[Mapping[str, Any], float], ...]  # (configuration, milliseconds); infinity: the card refused it

    @property
    def identity(self) -> tuple[str, ...]:
        """Entries with the same one replace each other in a merge."""
        return (self.card, self.triton, self.torch, self.kernel, json.dumps(self.key))

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: infinity becomes null."""
        configs = [{"config": dict(config), "ms": ms if math.isfinite(ms) else None} for config, ms in self.configs]
        return {**asdict(self), "key": list(self.key), "configs": configs}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Entry":
        """Raises KeyError, TypeError or ValueError for what isn't an entry."""
        words = {name: str(content[name]) for name in ("card", "capability", "triton", "torch", "kernel")}
        configs = tuple(
            (dict(item["config"]), math.inf if item["ms"] is None else float(item["ms"])) for item in content["configs"]
        )
        where = f"{words['kernel']} on {words['card']}"
        if not re.fullmatch(r"\d+\.\d", words["capability"]):
            raise ValueError(f"{where}: {words['capability']!r} is no compute capability")
        if not isinstance(content["key"], list):
            raise TypeError(f"{where}: its key is no list")
        if not configs or any(math.isnan(ms) or ms < 0 for _, ms in configs):
            raise ValueError(f"{where}: it needs configurations with times of 0 ms or more, or null")
        return cls(**words, key=tuple(content["key"]), configs=configs)


def load(path: Path) -> list[Entry]:
    """The entries of a bundle file. Raises BundleError when it can't be read or is of another format."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise BundleError(f"{path} has format {content['format']}, this image reads {FORMAT}: tune again with it.")
        if not isinstance(content["entries"], list):
            raise TypeError("its entries are no list")
        return [Entry.from_dict(entry) for entry in content["entries"]]
    except OSError as error:
        raise BundleError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(f"{path} is no bundle of `blackwell tune` ({error!r}).") from error


def dumps(entries: Iterable[Entry]) -> str:
    """A bundle's text; equal entries give equal text."""
    ordered = sorted(entries, key=lambda entry: entry.identity)
    return json.dumps({"format": FORMAT, "entries": [entry.to_dict() for entry in ordered]}, indent=1) + "\n"


def merge(bundles: Iterable[Sequence[Entry]]) -> list[Entry]:
    """All entries; of those with one identity the last."""
    return list({entry.identity: entry for bundle in bundles for entry in bundle}.values())


def config_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as `*.autotune.json` stores it, flat and without what is not set; `recorder` writes them the same way."""
    flat = {**stored["kwargs"], **{name: value for name, value in stored.items() if name not in ("kwargs", "pre_hook")}}
    return {name: value for name, value in flat.items() if value is not None}


def read_times(path: Path) -> tuple[tuple[Any, ...], list[tuple[dict[str, Any], float]]]:
    """Tuning key, and (configuration, first number of its times) of one of Triton's result files."""
    content = json.loads(path.read_text())
    return tuple(content["key"]), [(config_of(config), float(times[0])) for config, times in content["configs_timings"]]


def collect(directory: Path, **about: str) -> list[Entry]:
    """The measured results below a Triton cache directory: files, not the links an overlay has for baked ones. about: card and versions."""
    entries = []
    for path in sorted(directory.glob(f"*/*{SUFFIX}")):
        if not path.is_symlink():
            key, times = read_times(path)
            entries.append(Entry(kernel=path.name.removesuffix(SUFFIX), key=key, configs=tuple(times), **about))
    return entries


def apply(
    cache: Path, choices: Sequence[dict[str, Any]], entries: Sequence[Entry], *, cards: Sequence[str], triton: str
) -> list[str]:
    """Put measured times in the place of static scores, in the cache's result files and in the report's `choices`.

    Only for the cards being warmed, and only entries measured with this Triton. A result file belongs to a compute capability, not to a
    card: of several cards of one the first in `cards` wins. Returns a sentence for everything that could not be used.
    """
    problems = []
    for entry in sorted(
        entries, key=lambda e: list(cards).index(e.card) if e.card in cards else len(cards), reverse=True
    ):
        what = f"{entry.kernel} {list(entry.key)} on {entry.card}"
        if entry.card not in cards:
            continue
        if entry.triton != triton:
            problems.append(f"{what}: measured with Triton {entry.triton}, this is {triton}")
            continue
        arch = int(entry.capability.replace(".", ""))
        found = [
            c
            for c in choices
            if c["kernel"] == entry.kernel and c["arch"] == arch and c["key"] == [str(part) for part in entry.key]
        ]
        paths = [
            cache / "triton" / choice["directory"] / f"{entry.kernel}{SUFFIX}"
            for choice in found
            if choice.get("directory")
        ]
        if not any(path.exists() for path in paths):
            problems.append(f"{what}: no such kernel was warmed")
        for choice, path in zip(found, paths, strict=False):
            if path.exists() and (problem := _replace(path, choice, entry)):
                problems.append(f"{what}: {problem}")
    return problems


def _replace(path: Path, choice: dict[str, Any], entry: Entry) -> str | None:
    content = json.loads(path.read_text())
    best, best_ms = min(entry.configs, key=lambda pair: pair[1])
    if not math.isfinite(best_ms):
        return "the card refused all its configurations"
    # A configuration from elsewhere would be launched unchecked: it must be in the kernel's own list.
    if dict(best) not in [config_of(config) for config, _ in content["configs_timings"]]:
        return f"its best configuration {dict(best)} is not in the kernel's own list"
    measured = [(dict(config), ms) for config, ms in entry.configs]
    times = [
        next((ms for config, ms in measured if config == config_of(stored)), math.inf)
        for stored, _ in content["configs_timings"]
    ]
    content["configs_timings"] = [
        [stored, [ms] * 3] for (stored, _), ms in zip(content["configs_timings"], times, strict=True)
    ]
    path.write_text(json.dumps(content))
    choice.update(how="measured", chosen=dict(best), ms=best_ms, measured_on=entry.card)
    return None
