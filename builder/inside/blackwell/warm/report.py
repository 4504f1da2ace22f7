"""What a warm cache holds, as data: report.json beside the cache, and a flat summary for the image's labels."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blackwell.warm import cubin
from blackwell.warm.child import Outcome

FORMAT = 1
REPORT = "report.json"
SUMMARY = "summary.json"

# What the compiler sets or repeats for every kernel; the rest of a kernel's metadata that is set is its configuration.
CONFIG = ("num_warps", "num_stages", "num_ctas", "maxnreg", "warp_size", "launch_cooperative_grid", "launch_pdl")


def kernels(cache: Path) -> dict[str, dict[str, Any]]:
    """Every compiled kernel in Triton's cache by its hash: what it is for and what it needs."""
    found: dict[str, dict[str, Any]] = {}
    for binary in sorted((cache / "triton").glob("*/*.cubin")):
        metadata = json.loads(binary.with_suffix(".json").read_text())
        data = binary.read_bytes()
        facts = cubin.read(data, metadata["name"])
        found[metadata["hash"]] = {
            "kernel": metadata["name"],
            "hash": metadata["hash"],
            "directory": binary.parent.name,
            "target": metadata["target"],
            "config": {name: metadata[name] for name in CONFIG if metadata.get(name) not in (None, False)},
            "cubin_bytes": len(data),
            "code_bytes": facts.code_bytes,
            "registers": facts.registers,
            "spills": facts.spills,
            "shared_bytes": metadata["shared"],
        }
    return found


def make(
    cache: Path, outcomes: Iterable[tuple[str, Outcome]], before: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The report: the cache's content, joined with what the runs said of it.

    outcomes: (name of the run, how it went), warm runs only. before: an earlier report of the same cache, or {}. facts: put on top as is.
    """
    told = {entry["hash"]: entry for entry in before.get("kernels", [])}
    content = kernels(cache)
    choices = {_choice_key(entry): entry for entry in before.get("choices", [])}
    runs = list(before.get("runs", []))
    for hash_, entry in content.items():
        earlier = told.get(hash_, {})
        entry.update(
            {key: earlier.get(key) for key in ("compile_seconds", "specialization")},
            cards=list(earlier.get("cards", [])),
            runs=list(earlier.get("runs", [])),
        )
    for name, outcome in outcomes:
        for event in outcome.kernels:
            told_of = content.get(event["hash"])
            if told_of is None:
                continue
            _add(told_of["cards"], outcome.card)
            _add(told_of["runs"], name)
            if not event["hit"]:
                told_of["compile_seconds"] = event["seconds"]
                told_of["specialization"] = event["specialization"]
        for event in outcome.choices:
            entry = {
                **{key: value for key, value in event.items() if key != "event"},
                "card": outcome.card,
                "run": name,
            }
            choices[_choice_key(entry)] = entry
        runs.append(
            {
                "card": outcome.card, "run": name, "seconds": round(outcome.seconds, 1), "kernels_compiled": len(outcome.misses),
                "kernels_hit": outcome.hits, "graphs": dict(outcome.graphs),
            }
        )  # fmt: skip
    ordered = sorted(content.values(), key=lambda entry: (entry["kernel"], entry["target"]["arch"], entry["hash"]))
    return {
        "format": FORMAT,
        **facts,
        "kernels": ordered,
        "choices": list(choices.values()),
        "rejected": [
            {
                "kernel": entry["kernel"],
                "key": entry["key"],
                "card": entry["card"],
                "config": tried["config"],
                "reason": tried["rejected"],
            }
            for entry in choices.values()
            for tried in entry["configs"]
            if "rejected" in tried
        ],
        "runs": runs,
    }


def _choice_key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return (entry["kernel"], json.dumps(entry["key"]), str(entry["arch"]))


def _add(items: list[str], item: str) -> None:
    if item not in items:
        items.append(item)


def size(cache: Path) -> int:
    """Bytes of all files below the cache."""
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file() and not path.is_symlink())


def assembler_label(texts: Mapping[str, str]) -> str:
    """`ptxas-blackwell 13.1.80` from the assemblers' version texts, several joined by a comma."""
    return ", ".join(
        f"{name} {match[1]}" for name, text in texts.items() if (match := re.search(r"\bV(\d+\.\d+\.\d+)", text))
    )


def summary(cache: Path, report: Mapping[str, Any], cards: Sequence[str], assembler: str) -> dict[str, Any]:
    """Flat facts for the image's labels."""
    return {
        "cache.fingerprint": cache.name,
        "cache.entries": len(report["kernels"]),
        "cache.bytes": size(cache),
        "cache.assembler": assembler,
        "cache.cards": ", ".join(cards),
    }
