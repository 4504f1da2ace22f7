"""Which room may know which: data flows one way, only the engine room starts processes, inside code stands alone."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "builder"
PURE = {"values", "errors", "checks"}
MAY_IMPORT = {
    "matrix": PURE | {"rows", "rules"},
    "rows": PURE | {"rules"},
    "rules": PURE,
    "plan": PURE | {"rules", "cells", "mismatch"},
    "cells": PURE | {"rules"},
    "mismatch": PURE | {"rules", "cells"},
    "arch": PURE,
    "layout": PURE,
    "lock": PURE | {"layout"},
    "render": PURE | {"layout", "lock", "arch"},
    "engine": PURE | {"engine"},
    "build": PURE | {"engine"},
    "verify": PURE,
    "oci": PURE,
    "publish": PURE | {"engine", "oci", "verify"},
    "publish_files": PURE | {"engine", "oci", "publish"},
    "sbom": PURE,
    "report": PURE | {"engine", "sbom", "verify"},
    "diff": PURE | {"engine"},
    "bake": PURE | {"arch"},
    "provenance": PURE,
    "inside_data": PURE,
}
JOINERS = {"cli", "cli_publish", "options", "flow", "release", "__main__", "show", "readme", "ending"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


HOST = [p for p in sorted(ROOT.rglob("*.py")) if room(p) not in ("inside", "__init__")]


def test_rooms_know_only_what_the_table_says() -> None:
    for path in HOST:
        allowed = MAY_IMPORT.get(room(path))
        if allowed is not None:
            known = {name.split(".")[1] for name in imports(path) if name.startswith("builder.")}
            assert known - {room(path)} <= allowed, path


def test_only_the_engine_room_starts_processes() -> None:
    for path in HOST:
        if room(path) != "engine":
            assert not {n for n in imports(path) if n.partition(".")[0] in ("subprocess", "docker", "socket")}, path


def test_host_code_never_imports_what_lives_in_images() -> None:
    for path in HOST:
        assert not {n for n in imports(path) if n.partition(".")[0] in ("torch", "triton", "fla", "blackwell")}, path


def test_inside_code_never_imports_the_builder() -> None:
    for path in sorted((ROOT / "inside").rglob("*.py")):
        assert not {n for n in imports(path) if n.partition(".")[0] == "builder"}, path


def test_every_room_stands_in_the_table() -> None:
    assert {room(p) for p in HOST} - JOINERS <= MAY_IMPORT.keys() | PURE


def test_modules_stay_small() -> None:
    """A module that has outgrown a screenful or five wants to be two."""
    assert {p.name: n for p in HOST if (n := len(p.read_text().splitlines())) > 330} == {}
