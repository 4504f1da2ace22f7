"""Every committed lock renders to the committed Dockerfile, byte for byte. Refresh with `make golden`."""

import os
from pathlib import Path

import pytest

from builder import lock, render
from builder.matrix import load
from builder.plan import Request, resolve

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data"
LOCKS = sorted((ROOT / "matrices" / "locks").glob("*.lock.toml"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda p: p.name.removesuffix(".lock.toml"))
def test_dockerfile(path: Path) -> None:
    found = lock.loads(path.read_text(), where=path.name)
    image = resolve(load(ROOT / "matrices"), Request(id=found.name))
    rendered = render.dockerfile((ROOT / "Dockerfile.j2").read_text(), image, found)
    golden = DATA / f"{found.name}.Dockerfile"
    if os.environ.get("GOLDEN") == "refresh":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(rendered)
    assert golden.exists(), f"{golden.name} is missing: run `make golden` and look at what it changed"
    assert rendered == golden.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in DATA.glob("*.Dockerfile")} == {p.name.removesuffix(".lock.toml") for p in LOCKS}
