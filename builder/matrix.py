"""Read and check the version matrix: TOML files become one frozen `Matrix`, or one error that lists every problem."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from builder import checks
from builder.errors import MatrixError
from builder.rows import IDENTITY, ROWS, SETTINGS
from builder.rules import holds
from builder.values import Base, Capability, Condition, Exclude, Fla, Matrix, Platform, Rule, Stack

LONGEST_TAG = 128
# What identifiers end in beyond the base's name; a name that ends so too would make two images one.
_ENDINGS = re.compile(f"-({'|'.join(p.removeprefix('linux/') for p in get_args(Platform))}|sm[0-9]{{2,}})$")

Rows = Mapping[str, list[tuple[str, dict[str, Any]]]]
"""Well-formed rows by key, each with the path that errors call it by."""


def load(directory: Path) -> Matrix:
    """Read all TOML files of a directory. Raises MatrixError with every problem of every file."""
    data: dict[str, Any] = {}
    labels: dict[str, list[str]] = {}
    problems: list[str] = []
    for file in sorted(directory.glob("*.toml")):
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            problems.append(f"{file.name}: can't be read: {error.strerror}")
            continue
        except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits, too deep
            problems.append(f"{file.name}: {error}")
            continue
        for key, value in content.items():
            if key not in data:
                data[key] = value
            elif key in ROWS and isinstance(value, list) and isinstance(data[key], list):
                data[key] = [*data[key], *value]
            else:
                problems.append(f"{file.name}: {key}: stands in another file too")
            labels.setdefault(key, []).extend(
                f"{file.name}: {key}[{i}]" for i in range(len(value) if isinstance(value, list) else 0)
            )
    if not data and not problems:
        problems.append(f"{directory}: no TOML file is here")
    return from_dict(data, labels=labels, problems=problems)


def from_dict(
    data: Mapping[str, Any], *, labels: Mapping[str, Sequence[str]] | None = None, problems: Sequence[str] = ()
) -> Matrix:
    """Check everything and build the matrix.

    `labels` says how errors call each row (file and index), `problems` are those met before. Raises MatrixError with all
    problems, each with its path.
    """
    found = list(problems)
    # A file that can't be read would make everything in it look missing: say only what is wrong with the others.
    partial = bool(problems)
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = {key: [] for key in ROWS}
    found += [
        f"{key}: unknown key{checks.meant(key, [*ROWS, *SETTINGS])}" for key in data if key not in {*ROWS, *SETTINGS}
    ]
    for key, (required, optional) in ROWS.items():
        value = data.get(key, [])
        if not isinstance(value, list):
            found.append(f"{key}: must be an array of tables, [[{key}]]")
            continue
        if not value and key not in ("excludes", "rules") and not partial:
            found.append(f"{key}: needs at least one row")
        for i, row in enumerate(value):
            path = labels[key][i] if labels else f"{key}[{i}]"
            wrong = checks.table(path, row, required, optional)
            found += wrong
            if not wrong:
                rows[key].append((path, row))
    settings = {key: data[key] for key in SETTINGS if key in data}
    found += checks.table("", settings, {} if partial else SETTINGS, SETTINGS)
    sound = not found
    found += _row_contradictions(rows)
    if sound:
        # Whether something names no row can only be said when every row was understood.
        found += _dangling(rows, settings)
    if found:
        raise MatrixError(
            found, hint="`#:schema ./schema.json` on the first line lets an editor check a file while you type"
        )
    return _build(rows, settings)


def _row_contradictions(rows: Rows) -> Iterator[str]:
    """Problems of and between well-formed rows: duplicates, two defaults for one thing, images that can't be built."""
    for key, names in IDENTITY.items():
        first: dict[str, str] = {}
        for path, row in rows[key]:
            other = first.setdefault(repr([row.get(name) for name in names]), path)
            if other != path:
                yield f"{path}: is a duplicate of {other}"
    for path, row in rows["bases"]:
        if ("suite" in row) == ("reference" in row):
            yield f"{path}: needs exactly one of `suite` and `reference`"
        if _ENDINGS.search(row["name"]):
            yield f"{path}.name: an identifier that ends in {row['name']!r} would mean a platform or capabilities"
    yield from _stack_contradictions(rows["stacks"])


def _dangling(rows: Rows, settings: Mapping[str, Any]) -> Iterator[str]:
    """Defaults and excludes that meet no row."""
    have = {
        "base": [row["name"] for _, row in rows["bases"]],
        "fla": [row["version"] for _, row in rows["fla"]],
        "conv1d": [row["version"] for _, row in rows["conv1d"]],
        "capabilities": settings["capabilities"],
    }
    for axis, value in settings["defaults"].items():
        for one in value if isinstance(value, list) else [value]:
            if one not in have[axis]:
                yield f"defaults.{axis}: {one!r} names no row{checks.meant(one, have[axis])}"
    for path, row in rows["bases"]:
        if (length := _longest_identifier(rows, row, settings["capabilities"])) > LONGEST_TAG:
            yield f"{path}.name: makes an identifier of {length} characters; a tag holds {LONGEST_TAG}"
    for path, row in rows["excludes"]:
        if not _meets(row["when"], rows, settings["platforms"]):
            yield f"{path}.when: excludes nothing: no image of this matrix is like that"


def _longest_identifier(rows: Rows, base: Mapping[str, Any], capabilities: Sequence[str]) -> int:
    """Length of the longest identifier that images on a base can have."""
    parts = [(rows["stacks"], axis) for axis in ("cuda", "torch", "triton")]
    parts += [(rows["fla"], "version"), (rows["conv1d"], "version")]
    versions = sum(max(len(row[axis]) for _, row in some) for some, axis in parts)
    words = len("cu-torch-triton-fla-conv1d-py-") + len(base["python"]) + len(base["name"]) + len("-arm64")
    return versions + words + sum(len(f"-sm{capability}") - 1 for capability in capabilities)


def _stack_contradictions(stacks: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Problems of stacks as a whole."""
    defaults: dict[tuple[str, str], str] = {}
    for path, row in stacks:
        override = row.get("triton_pin", row["triton"]) != row["triton"]
        if override and "reason" not in row:
            yield f"{path}.reason: is missing: torch pins Triton {row['triton_pin']}, so say why it is {row['triton']} here"
        if not override and {"reason", "triton_pin"} & row.keys():
            yield f"{path}.triton_pin: only for a Triton that torch doesn't pin"
        if "toolkit" in row and "devel_image" in row:
            yield f"{path}: takes its compiler from `toolkit` or from `devel_image`, not from both"
        compiler = {pin.partition("==")[0]: pin.partition("==")[2] for pin in row.get("toolkit", [])}
        if row.get("conv1d") != "none" and "devel_image" not in row and "nvidia-cuda-nvcc" not in compiler:
            yield f'{path}: has no compiler for causal-conv1d: `toolkit` with nvidia-cuda-nvcc, `devel_image`, or conv1d = "none"'
        nvcc = compiler.get("nvidia-cuda-nvcc", row["cuda"])
        if nvcc.split(".")[:2] != row["cuda"].split("."):
            yield f"{path}.toolkit: nvcc {nvcc} is not of torch's CUDA {row['cuda']}"
        for axis in row.get("default_for", []):
            line = ".".join(row[axis].split(".")[:2])
            other = defaults.setdefault((axis, line), path)
            if other != path:
                yield f"{path}.default_for: {other} is the default for {axis} {line} already"


def _meets(when: Mapping[str, Any], rows: Rows, platforms: Iterable[str]) -> bool:
    """Is there an image that the condition of an exclude holds for? Looks at each axis once, not at every image."""
    parts = {axis: str(value).lower() if axis == "override" else value for axis, value in when.items()}

    def fits(row: Mapping[str, Any]) -> bool:
        return all(holds(axis, wanted, row[axis]) for axis, wanted in parts.items() if axis in row)

    conv1ds = {row["version"] for _, row in rows["conv1d"] if fits({"conv1d": row["version"]})}
    none = fits({"conv1d": "none"})
    stacks = (
        {
            "cuda": row["cuda"],
            "torch": row["torch"],
            "triton": row["triton"],
            "override": str("triton_pin" in row).lower(),
        }
        for _, row in rows["stacks"]
        if (none if row.get("conv1d") else conv1ds)
    )
    return (
        any(map(fits, stacks))
        and any(fits({"fla": row["version"], "transformers": row["transformers"]}) for _, row in rows["fla"])
        and any(fits({"base": row["name"], "python": row["python"]}) for _, row in rows["bases"])
        and any(fits({"platform": platform}) for platform in platforms)
    )


def _build(rows: Rows, settings: Mapping[str, Any]) -> Matrix:
    """Turn sound rows into frozen values."""
    frozen: dict[str, list[dict[str, Any]]] = {
        key: [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for _, row in rows[key]]
        for key in rows
    }
    defaults = {axis: value for axis, value in settings["defaults"].items() if axis != "capabilities"}
    return Matrix(
        bases=tuple(Base(**row) for row in frozen["bases"]),
        stacks=tuple(Stack(**{"triton_pin": row["triton"], **row}) for row in frozen["stacks"]),
        fla=tuple(Fla(**row) for row in frozen["fla"]),
        conv1d=tuple(row["version"] for row in frozen["conv1d"]),
        capabilities=_capabilities(settings["capabilities"]),
        default_capabilities=_capabilities(settings["defaults"]["capabilities"]),
        platforms=tuple(settings["platforms"]),
        defaults=tuple(sorted(defaults.items())),
        budget=settings["budget_zstd_bytes"],
        excludes=tuple(Exclude(**{**row, "when": _condition(row["when"])}) for row in frozen["excludes"]),
        rules=tuple(Rule(**{**row, "when": _condition(row["when"])}) for row in frozen["rules"]),
    )


def _capabilities(texts: Iterable[str]) -> tuple[Capability, ...]:
    return tuple(sorted(Capability.parse(text) for text in texts))


def _condition(when: Mapping[str, Any]) -> Condition:
    where = {k: str(v).lower() if k == "override" else v for k, v in when.items() if k != "capabilities"}
    return Condition(where=tuple(sorted(where.items())), capabilities=_capabilities(when.get("capabilities", ())))
