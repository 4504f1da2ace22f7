"""Answers on stdout (JSON or a plain table), words for people on stderr."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def emit_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document to stdout; a number that JSON has no word for (infinite, not a number) is null."""
    json.dump(_finite(value), sys.stdout, indent=2, sort_keys=False, default=str)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def emit_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a left-aligned table to stdout; the last column is not padded."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max([len(h), *(len(r[i]) for r in cells)]) for i, h in enumerate(header)]
    for row in [list(header), *cells]:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def flat(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Rows for a table from nested mappings: names joined by dots, lists by commas; empty ones and None as "-"."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, (list, tuple)):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "-"
        else:
            yield f"{prefix}{name}", "-" if value is None or value == {} else value


def say(message: str) -> None:
    """One line for a person, on stderr."""
    print(message, file=sys.stderr, flush=True)
