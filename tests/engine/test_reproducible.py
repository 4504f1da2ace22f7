"""Two builds of one lock, each on an engine with nothing in it, have the same file tree: content, mode, owner."""

from dataclasses import asdict
from pathlib import Path

import pytest

from builder import arch, build
from builder.engine import contents, docker
from builder.engine.process import run
from tests.engine.conftest import Small
from tests.engine.engines import clean_engine


def built_on(host: str, small: Small, folder: Path, monkeypatch: pytest.MonkeyPatch) -> contents.Contents:
    """What a small image is like when the engine at `host` builds it from nothing."""
    monkeypatch.setenv("DOCKER_HOST", host)
    engine = docker.probe(run)
    assert engine is not None and engine.api.images.list() == []
    build.write_context(folder / "context", small.work(), small.rootfs, small.uv)
    request = docker.BuildRequest(
        context=folder / "context",
        target="libraries",
        tag="builder-test:twice",
        arguments={"GENCODE": arch.gencode(small.image.capabilities), "JOBS": "1", "EXTENSIONS": "store"},
        secrets=build.secrets_of(run, folder),
        network="host",
    )
    docker.build(run, engine, request, lambda _line: None)
    return contents.local(engine, "builder-test:twice")


@pytest.mark.slow
def test_two_clean_engines_make_the_same_file_tree(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch, clean_engine(tmp_path / name / "engine") as host:
            made.append(built_on(host, small, tmp_path / name, patch))
    one, two = made
    assert len(one.entries) > 5000 and "opt/venv/bin/python" in one.entries
    different = {p for p in one.entries.keys() | two.entries.keys() if one.entries.get(p) != two.entries.get(p)}
    assert {p: (asdict(one.entries[p]), asdict(two.entries[p])) for p in sorted(different)} == {}
