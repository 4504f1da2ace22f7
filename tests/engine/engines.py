"""Docker Engines of a test's own, with nothing in them, beside the one that runs."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker as sdk
import pytest

# Another dockerd than the installed one, for example a newer one with a BuildKit that rewrites times.
DOCKERD = os.environ.get("BUILDER_TEST_DOCKERD") or shutil.which("dockerd") or shutil.which("dockerd", path="/usr/sbin")


@contextlib.contextmanager
def clean_engine(folder: Path, *options: str) -> Iterator[str]:
    """Start a Docker Engine without any image or cache, and without a network of its own; its DOCKER_HOST. Needs root."""
    if os.geteuid() or not DOCKERD:
        pytest.skip("an engine of one's own needs root and dockerd")
    folder.mkdir(parents=True)
    running = tempfile.mkdtemp(prefix="engine-")  # short: paths of sockets may have 107 bytes
    socket = f"unix://{running}/docker.sock"
    argv = [
        DOCKERD,
        "--host",
        socket,
        "--data-root",
        folder / "data",
        "--exec-root",
        f"{running}/run",
        "--pidfile",
        folder / "pid",
    ]
    argv += ["--bridge=none", "--iptables=false", "--ip6tables=false", *options]
    (folder / "daemon.json").write_text("{}")
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen([*argv, "--config-file", folder / "daemon.json"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                sdk.DockerClient(base_url=socket, timeout=10).ping()
                break
            except Exception:
                if daemon.poll() is not None or time.monotonic() > deadline:
                    pytest.fail("the engine did not start:\n" + (folder / "log").read_text()[-2000:])
                time.sleep(0.2)
        yield socket
    finally:
        daemon.terminate()
        try:
            daemon.wait(timeout=60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(running, ignore_errors=True)
