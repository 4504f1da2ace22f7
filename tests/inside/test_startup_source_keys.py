"""The remembered hashes of Triton's and torch's own files: the same as made anew, only while the files are the same, and never in the way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import blackwell
import pytest
from blackwell import source_keys

INSIDE = Path(blackwell.__file__).resolve().parents[1]
ASK = (
    "import blackwell.startup, json; from triton.runtime.cache import triton_key; from triton.runtime import autotuner; "
    "from torch._inductor.codecache import torch_key; assert autotuner.triton_key is triton_key; "
    "print(json.dumps([triton_key(), torch_key().hex(), hasattr(torch_key, 'set') and hasattr(torch_key, 'clear')]))"
)


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    """What a cache would keep: made in a process without the hook."""
    code = "import json; from blackwell import source_keys; print(json.dumps(source_keys.gather()))"
    answer: dict[str, Any] = json.loads(python(code, BLACKWELL_STARTUP="0"))
    return answer


def python(code: str, **more: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(INSIDE), **more}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def asked(cache: Path) -> list[Any]:
    """[triton_key, torch_key, torch's own cache functions are there] as a job with this cache sees them."""
    answer: list[Any] = json.loads(python(ASK, BLACKWELL_CACHE=str(cache), BLACKWELL_STARTUP="1"))
    return answer


def kept(cache: Path, content: Any) -> Path:
    cache.mkdir(exist_ok=True)
    (cache / source_keys.FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return cache


def test_remembered_hashes_are_taken(truth: dict[str, Any], tmp_path: Path) -> None:
    """Marked ones, so that one made anew would be noticed."""
    marked = {
        **truth,
        "triton": {**truth["triton"], "key": "marked"},
        "torch": {**truth["torch"], "key": "ab" * 32},
    }
    assert asked(kept(tmp_path / "cache", marked)) == ["marked", "ab" * 32, True]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 1, "triton": null, "torch": 3}',
        "another format",
        "another stamp",
        "[" * 100_000,
        "a key that is none",
        "a pipe",
        "a directory",
        None,
    ],
    ids=lambda content: str(content)[:30],
)
def test_anything_else_is_made_anew(truth: dict[str, Any], content: str | None, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    if content == "another format":
        kept(
            cache,
            {
                **truth,
                "format": 2,
                "triton": {**truth["triton"], "key": "wrong"},
                "torch": {**truth["torch"], "key": "00"},
            },
        )
    elif content == "another stamp":
        kept(cache, {**truth, **{name: {"stamp": "0" * 64, "key": "00"} for name in ("triton", "torch")}})
    elif content == "a key that is none":
        kept(cache, {**truth, "torch": {**truth["torch"], "key": truth["torch"]["key"][1:]}})
    elif content == "a pipe":
        cache.mkdir()
        os.mkfifo(cache / source_keys.FILE)
    elif content == "a directory":
        (cache / source_keys.FILE).mkdir(parents=True)
    elif content is not None:
        kept(cache, content)
    assert asked(cache) == [truth["triton"]["key"], truth["torch"]["key"], True]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a module, a library as Triton has it, a subpackage, and files that are no part of a hash."""
    root = tmp_path / "package"
    for name in (
        "__init__.py",
        "a.py",
        "_C/libx.so",
        "sub/__init__.py",
        "sub/b.py",
        "include/x.h",
        "notes/c.py",
        "_inductor/__init__.py",
        "_inductor/d.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
        os.utime(root / name, (1e9, 1e9))
    return root


def grow(path: Path) -> None:
    path.write_text(path.read_text() + "#")
    os.utime(path, (1e9, 1e9))


def same_but(path: Path, text: str) -> None:
    """Another content of the same size, with the time that all files of an image have."""
    assert len(text) == path.stat().st_size
    path.write_text(text)
    os.utime(path, (1e9, 1e9))


CHANGES = {
    "edited, same size": lambda root: (root / "a.py").write_text("b.py"),
    "edited, same size and time": lambda root: same_but(root / "a.py", "b.py"),
    "Inductor edited, same size and time": lambda root: same_but(root / "_inductor/d.py", "_inductor/e.py"),
    "edited, same time": lambda root: grow(root / "sub/b.py"),
    "another library": lambda root: grow(root / "_C/libx.so"),
    "a new module": lambda root: (root / "sub/new.py").write_text(""),
    "a module gone": lambda root: (root / "sub/b.py").unlink(),
    "renamed": lambda root: (root / "a.py").rename(root / "z.py"),
    "a new subpackage": lambda root: shutil.copytree(root / "sub", root / "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_stamp_notices(change: str, package: Path) -> None:
    before = source_keys.stamp(str(package))
    CHANGES[change](package)
    assert source_keys.stamp(str(package)) != before


def test_all_of_tritons_python_is_in_the_stamp_by_content(package: Path) -> None:
    triton = package.rename(package.with_name("triton"))
    before = source_keys.stamp(str(triton))
    same_but(triton / "sub/b.py", "sub/c.py")
    assert source_keys.stamp(str(triton)) != before


def test_the_stamp_stays_where_nothing_that_counts_changed(package: Path, tmp_path: Path) -> None:
    before = source_keys.stamp(str(package))
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.pyc").write_text("compiled")
    grow(package / "include/x.h")
    shutil.copytree(package, tmp_path / "elsewhere")
    assert source_keys.stamp(str(package)) == before == source_keys.stamp(str(tmp_path / "elsewhere"))


def test_every_file_of_tritons_own_hash_is_in_the_stamp() -> None:
    """Asked from Triton: every file that it opens to make its hash must change the stamp."""
    code = (
        "import sys, os, json, triton, torch; from blackwell import source_keys; from torch._inductor import codecache; "
        "from triton.runtime import cache; roots = [os.path.dirname(m.__file__) for m in (triton, torch)]; opened = set(); on = [False]\n"
        "sys.addaudithook(lambda e, a: opened.add(str(a[0])) if on[0] and e == 'open' and isinstance(a[0], str) else None)\n"
        "on[0] = True; cache.triton_key(); codecache.torch_key(); on[0] = False\n"
        "stamped = {p for r in roots for p, *_ in source_keys._files(r)}\n"
        "hashed = {p for p in opened if any(p.startswith(r + '/') for r in roots) and '__pycache__' not in p}\n"
        "print(json.dumps([len(hashed), sorted(hashed - stamped)]))"
    )
    count, missing = json.loads(python(code, BLACKWELL_STARTUP="0"))
    assert count > 1000
    assert missing == []
