"""A whole image, as people get it: verified, published, pulled into an engine that has nothing, and tested there again.

`make test` builds and verifies the image first. Everything else about publishing is shown with a tiny image in test_publish.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import flow, plan, release
from builder.engine import docker, host, scratch
from builder.engine.process import run
from builder.engine.skopeo import Access
from tests.engine import engines, registries

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on the store's disk: an image, pushed and pulled, is more than a /tmp in memory holds."""
    with scratch.directory(host.store()) as folder:
        yield folder


@pytest.mark.slow
def test_a_published_image_is_the_verified_one_wherever_it_is_pulled(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    project, engine = flow.Project.find(), docker.ensure(run, print)
    image = flow.choose(project, plan.Request(triton="3.7", capabilities=("12.0",)))
    found = docker.existing(engine, image.tag, "`make test` builds it first")
    verdict = release.read_verdict(found["Id"])
    assert verdict is not None and verdict.passed, f"{image.tag} has no passing verdict; `builder verify` gives one"
    (place / "registry").mkdir()
    with registries.serving(place / "registry") as registry:
        wish = release.Wish(to=registry.repository, access=registry.access or Access())
        outcome = release.publish_image(run, project, image, wish, print)
        assert image.id in outcome.tags and "triton3.7-sm120" in outcome.tags
        with engines.clean_engine(place / "engine") as socket:
            there = [str(engine.client), "--host", socket]
            reference = f"{registry.repository}@{outcome.digest}"
            subprocess.run([*there, "pull", "--quiet", reference], check=True, timeout=1200)
            identity = subprocess.run(
                [*there, "image", "inspect", "--format", "{{.Id}}", reference],
                check=True,
                capture_output=True,
                text=True,
            )
            assert identity.stdout.strip() == found["Id"] == verdict.digest
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "tests/image/test_contents.py", "tests/image/test_warm.py", "-k", "not workload", "--image", reference],
                cwd=ROOT, env={**os.environ, "DOCKER_HOST": socket}, capture_output=True, text=True, timeout=1500, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-5000:]
            print(done.stdout.splitlines()[-1])
