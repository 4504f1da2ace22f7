"""Faults of a build, produced for real: each ends in its own error, and nothing half-made stays."""

import http.server
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from builder.engine import docker, host
from builder.engine.process import run
from builder.errors import BuildError, BusyError, DriftError, HashMismatchError, NetworkError, ResourceError
from builder.values import DebianPackage
from tests.engine.conftest import Small

ROOT = Path(__file__).resolve().parents[2]


def no_image(small: Small) -> bool:
    return docker.inspect(small.engine, small.image.tag) is None


def test_a_distribution_whose_hash_differs_from_the_lock_is_refused(small: Small) -> None:
    tampered = [
        replace(d, hashes=("sha256:" + "1" * 64,)) if d.name == "packaging" else d for d in small.lock.distributions
    ]
    with pytest.raises(HashMismatchError) as refused:
        small.build(replace(small.lock, distributions=tuple(tampered)))
    assert "packaging" in refused.value.message
    assert no_image(small)


def test_a_network_that_is_gone_says_so(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    # Another version than any build before: the uv cache has nothing of it, so the index must be asked.
    pins = [replace(d, version="24.0") if d.name == "packaging" else d for d in small.lock.distributions]
    with pytest.raises(NetworkError) as refused:
        small.build(replace(small.lock, distributions=tuple(pins)))
    assert "same command" in refused.value.hint
    assert no_image(small)


def test_uvs_own_configuration_reaches_the_build(small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text("index-url = 3\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    pins = [replace(d, version="24.0") if d.name == "packaging" else d for d in small.lock.distributions]
    with pytest.raises(BuildError, match="index-url = 3"):
        small.build(replace(small.lock, distributions=tuple(pins)))
    assert no_image(small)


def test_a_mirror_that_serves_other_packages_is_refused(small: Small, tmp_path: Path) -> None:
    from builder.engine import debian

    other = (*small.lock.debian[:-1], DebianPackage(name="zlib1g", version="0:0.0"))
    with pytest.raises(DriftError, match=r"zlib1g: locked 0:0\.0"):
        debian.locked_rootfs(run, small.image.base, "amd64", small.lock.epoch, other, tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_two_builds_of_one_image_at_once(small: Small) -> None:
    with host.exclusive(small.image.id), pytest.raises(BusyError, match=str(os.getpid())):
        small.build()
    assert no_image(small)


@pytest.mark.parametrize("found", [{"disk": 10**9}, {"memory": 10**9}])
def test_too_little_disk_or_memory_is_said_before_anything_is_built(found: dict[str, int]) -> None:
    have = host.Resources(**{"cores": 2, "memory": 20 * host.GB, "disk": 100 * host.GB, **found})
    with pytest.raises(ResourceError, match=r"1\.0 GB"):
        host.check_resources(have)


INTERRUPTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with Ctrl-C ignored, and so all below
from dataclasses import replace
from builder.cli import main
from builder import flow
from tests.engine.conftest import small
made = small.__wrapped__() if hasattr(small, "__wrapped__") else small.__pytest_wrapped__.obj()
new = replace(made.lock, epoch=made.lock.epoch + int(time.time()) % 10**6 + 1)  # nothing of it is cached: it takes seconds
flow.build_image = lambda *a, **k: made.build(new, say=lambda m: print(m, file=sys.stderr, flush=True))
main(["build", "--triton", "3.7"])
"""


def test_ctrl_c_in_the_middle_leaves_no_image_and_no_lock(small: Small) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(("base: ", "libraries: ")):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err and "same command" in err
    assert no_image(small)
    with host.exclusive(small.image.id):
        pass


class Index(http.server.BaseHTTPRequestHandler):
    """A private index that wants a password and has nothing; it remembers what it was asked."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization", "")))
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    Index.asked.clear()
    attributes = docker.ensure(run, print).api.networks.get("bridge").attrs
    gateway = str(ipaddress.ip_network(attributes["IPAM"]["Config"][0]["Subnet"])[1])
    server = http.server.ThreadingHTTPServer((gateway, 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://user:hunter2secret@{gateway}:{server.server_port}/private-mirror/simple"
    server.shutdown()


def test_index_proxy_and_certificates_of_the_host_reach_the_build_but_no_layer(
    small: Small, index: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The private index is asked, with its password; the exported image, its history and labels hold nothing of it."""
    monkeypatch.setenv("UV_INDEX", index)
    monkeypatch.setenv("no_proxy", "very-private-host.example")
    bundle = tmp_path / "bundle.crt"
    from builder.engine.environment import ca_bundle

    ours = ca_bundle()
    bundle.write_text((ours.read_text() if ours else "") + "\n# marker-of-the-company-certificate\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    pins = tuple(d for d in small.lock.distributions)
    work = small.work(replace(small.lock, distributions=pins, epoch=small.lock.epoch + int(time.time()) % 1000 + 1))
    from builder import build

    context, secrets = tmp_path / "context", build.secrets_of(run, tmp_path)
    build.write_context(context, work, small.rootfs, small.uv)
    request = docker.BuildRequest(context=context, target="libraries", tag="builder-test:secrets", secrets=secrets)
    docker.build(run, small.engine, request, lambda _line: None)
    assert any("private-mirror" in path and authorization for path, authorization in Index.asked)

    archive = tmp_path / "image.tar"
    with archive.open("wb") as out:
        subprocess.run([small.engine.client, "save", "builder-test:secrets"], stdout=out, check=True)
    marks = [b"hunter2secret", b"private-mirror", b"very-private-host.example", b"marker-of-the-company-certificate"]
    content = archive.read_bytes()
    assert b"packaging" in content
    assert [m for m in marks if m in content] == []
    attributes = str(docker.inspect(small.engine, "builder-test:secrets"))
    history = str(small.engine.api.images.get("builder-test:secrets").history())
    assert [m for m in marks if m.decode() in attributes + history] == []
