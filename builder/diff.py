"""What changed from one image to another, in words for a release note. Pure."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from typing import Any, Literal

from builder.engine.contents import Contents, Entry

WARM = r"opt/blackwell/cache/\w+/report\.json"
CACHE = "opt/blackwell/cache/"  # its names are hashes; the kernels say what they mean
# Labels that differ in every build and say nothing that isn't said elsewhere.
NOISE = ("io.blackwell.inputs", "io.blackwell.lock", "org.opencontainers.image.created")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that changed: "" stands for not there."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A path that is new, gone or changed, with its size in bytes before and after (0: not there, or empty)."""

    path: str
    what: Literal["new", "gone", "changed"]
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Everything that differs between two images; `kernels` counts compiled kernels by name and capability."""

    before: str
    after: str
    same: bool
    python: tuple[Change, ...]
    debian: tuple[Change, ...]
    labels: tuple[Change, ...]
    kernels: tuple[Change, ...]
    files: tuple[FileChange, ...]
    size_before: int
    size_after: int


def compare(a: Contents, b: Contents) -> Difference:
    """The difference from `a` to `b`."""
    files = [
        FileChange(
            path=p,
            what="new" if p not in a.entries else "gone" if p not in b.entries else "changed",
            before=_size(a.entries.get(p)),
            after=_size(b.entries.get(p)),
        )
        for p in a.entries.keys() | b.entries.keys()
        if a.entries.get(p) != b.entries.get(p)
    ]
    labels_a = {k: v for k, v in a.labels.items() if k not in NOISE}
    labels_b = {k: v for k, v in b.labels.items() if k not in NOISE}
    return Difference(
        before=a.reference,
        after=b.reference,
        same=not files and a.labels == b.labels,
        python=_changes(distributions(a.texts), distributions(b.texts)),
        debian=_changes(packages(a.texts), packages(b.texts)),
        labels=_changes(labels_a, labels_b),
        kernels=_changes(kernels(a), kernels(b)),
        files=tuple(sorted(files, key=lambda f: (-abs(f.after - f.before), f.path))),
        size_before=sum(e.size for e in a.entries.values() if e.kind == "file"),
        size_after=sum(e.size for e in b.entries.values() if e.kind == "file"),
    )


def _size(entry: Entry | None) -> int:
    return entry.size if entry else 0


def _changes(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[Change, ...]:
    names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
    return tuple(Change(name=n, before=a.get(n, ""), after=b.get(n, "")) for n in names)


def distributions(texts: Mapping[str, str]) -> dict[str, str]:
    """Installed Python distributions: name -> version."""
    found = {}
    for path, text in texts.items():
        if path.endswith(".dist-info/METADATA"):
            fields = HeaderParser().parsestr(text)
            found[re.sub(r"[-_.]+", "-", fields.get("Name", "")).lower()] = fields.get("Version", "")
    return found


def packages(texts: Mapping[str, str]) -> dict[str, str]:
    """Installed Debian packages: name -> version."""
    blocks = texts.get("var/lib/dpkg/status", "").split("\n\n")
    fields = [dict(re.findall(r"^(Package|Version): (.*)$", b, re.MULTILINE)) for b in blocks]
    return {f["Package"]: f["Version"] for f in fields if len(f) == 2}


def kernels(contents: Contents) -> dict[str, str]:
    """Warm kernels: "name on capability" -> how many."""
    report: dict[str, Any] = json.loads(contents.text(WARM) or "{}")
    counts = Counter((k["kernel"], k["target"]["arch"]) for k in report.get("kernels", []))
    return {f"{name} on {arch // 10}.{arch % 10}": str(n) for (name, arch), n in counts.items()}


def as_dict(found: Difference) -> dict[str, Any]:
    """The difference for machines."""
    return asdict(found)


def markdown(found: Difference, *, files: int = 20) -> str:
    """The difference in words, with at most this many files."""
    if found.same:
        return f"`{found.after}` has the same files and labels as `{found.before}`.\n"
    lines = [f"## From `{found.before}` to `{found.after}`", ""]
    moved = found.size_after - found.size_before
    lines += [
        f"{found.size_after / 1e6:,.1f} MB of files, {abs(moved) / 1e6:,.1f} MB {'more' if moved >= 0 else 'less'} than before.",
        "",
    ]
    for title, changes in (("Python distributions", found.python), ("Debian packages", found.debian)):
        lines += _section(title, [_sentence(c) for c in changes])
    lines += _section("Warm kernels", _kernel_lines(found.kernels))
    lines += _section("Labels", [_sentence(c) for c in found.labels])
    named = [f for f in found.files if not f.path.startswith(CACHE)]
    shown = [f"`/{f.path}`: {_file(f)}" for f in named[:files]]
    shown += [f"and {len(named) - len(shown):,} more"] if len(named) > len(shown) else []
    if inside := [f for f in found.files if f.path.startswith(CACHE)]:
        counts = Counter(f.what for f in inside)
        shown.append("in the kernel cache: " + ", ".join(f"{counts[w]:,} {w}" for w in ("new", "gone", "changed")))
    lines += _section("Files, largest change first", shown)
    return "\n".join(lines)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"### {title}", "", *(f"- {line}" for line in lines), ""] if lines else []


def _sentence(change: Change) -> str:
    if not change.before:
        return f"{change.name} {change.after} is new"
    if not change.after:
        return f"{change.name} {change.before} is gone"
    return f"{change.name} {change.before} → {change.after}"


def _kernel_lines(changes: Sequence[Change]) -> list[str]:
    deltas = [(c, int(c.after or 0) - int(c.before or 0)) for c in changes]
    lines = []
    for word, sign in (("gained", 1), ("lost", -1)):
        some = [(c, abs(d)) for c, d in deltas if d * sign > 0]
        if some:
            names = ", ".join(f"{c.name} ({n})" for c, n in some)
            lines.append(f"{word} {sum(n for _, n in some)}: {names}")
    return lines


def _file(change: FileChange) -> str:
    if change.what != "changed":
        return f"{change.what}, {max(change.before, change.after) / 1e6:,.1f} MB"
    if change.before == change.after:
        return "other content, mode or owner, same size"
    return f"{change.before / 1e6:,.1f} → {change.after / 1e6:,.1f} MB"
