"""Fixtures for tests of built images: one run of every test for each --image, in a container of that image."""

import json
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import testinfra

from builder import lock as locks
from builder.engine import docker
from builder.engine.process import run
from builder.values import Lock

ROOT = Path(__file__).resolve().parents[2]
RunIn = Callable[..., subprocess.CompletedProcess[str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--image", action="append", default=[], metavar="REFERENCE", help="image to test; repeatable")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "image" in metafunc.fixturenames:
        references = metafunc.config.getoption("--image")
        if not references:
            raise pytest.UsageError("tests/image needs --image REFERENCE; `make test` and `builder verify` give it")
        metafunc.parametrize("image", references, indirect=True, scope="session")


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """A built image: how to name it, what it says of itself, the lock it was made from, and what the engine knows of it."""

    reference: str
    facts: dict[str, Any]
    lock: Lock
    config: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.config["Labels"])

    @property
    def python(self) -> str:
        return f"python{self.facts['versions']['python']}"


@pytest.fixture(scope="session")
def engine() -> docker.Engine:
    return docker.ensure(run, print)


@pytest.fixture(scope="session")
def run_in(engine: docker.Engine) -> Iterator[RunIn]:
    """Run a command in a fresh container and wait for it; the container is gone afterwards, whatever happened."""
    names: list[str] = []

    def go(
        reference: str,
        *argv: str,
        user: str | None = None,
        read_only: bool = False,
        tmpfs: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        mounts: Sequence[str] = (),
        timeout: float = 120,
        entrypoint: str | None = None,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        name = f"blackwell-test-{uuid.uuid4().hex[:12]}"
        names.append(name)
        words = [str(engine.client), "run", "--rm", "--name", name, *options]
        words += ["--user", user] if user else []
        words += ["--read-only"] if read_only else []
        words += [w for t in tmpfs for w in ("--tmpfs", t)]
        words += [w for k, v in (env or {}).items() for w in ("--env", f"{k}={v}")]
        words += [w for m in mounts for w in ("--volume", m)]
        words += ["--entrypoint", entrypoint] if entrypoint is not None else []
        try:
            return subprocess.run(
                [*words, reference, *argv], capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            subprocess.run([str(engine.client), "rm", "-f", name], capture_output=True, check=False)
            raise

    yield go
    subprocess.run([str(engine.client), "rm", "-f", *names], capture_output=True, check=False)


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest, engine: docker.Engine, run_in: RunIn) -> BuiltImage:
    reference: str = request.param
    found = docker.inspect(engine, reference)
    if found is None:
        pytest.fail(f"there is no image {reference}; build it first")
    read = run_in(reference, "cat", "/opt/blackwell/image.json", "/opt/blackwell/lock.toml")
    assert read.returncode == 0, read.stderr
    facts, end = json.JSONDecoder().raw_decode(read.stdout)
    return BuiltImage(
        reference=reference,
        facts=facts,
        lock=locks.loads(read.stdout[end:], where=f"{facts['id']}.lock.toml"),
        config=found["Config"],
    )


@pytest.fixture(scope="session")
def container(image: BuiltImage, engine: docker.Engine) -> Iterator[str]:
    """A container of the image that stays while its tests run; its id."""
    done = subprocess.run(
        [str(engine.client), "run", "-d", "--entrypoint", "sleep", image.reference, "infinity"],
        capture_output=True,
        text=True,
        check=True,
    )
    name = done.stdout.strip()
    yield name
    subprocess.run([str(engine.client), "rm", "-f", name], capture_output=True, check=False)


@pytest.fixture(scope="session")
def host(container: str) -> testinfra.host.Host:
    """testinfra's view of the container."""
    return testinfra.get_host(f"docker://{container}")
