"""Docker Engines of a test's own, with nothing in them, beside the one that runs."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker as sdk
import pytest

from builder.engine import docker
from builder.engine.process import run

DOCKERD = shutil.which("dockerd") or shutil.which("dockerd", path="/usr/sbin")


@contextlib.contextmanager
def clean_engine(folder: Path, dockerd: str | Path | None = DOCKERD, **features: bool) -> Iterator[str]:
    """Start a Docker Engine without any image or cache; its DOCKER_HOST. Builds on it need the host's network. Needs root."""
    if os.geteuid() or not dockerd:
        pytest.skip("an engine of one's own needs root and dockerd")
    docker.require_tools(run, print, {"ip": "iproute2"})
    folder.mkdir(parents=True)
    running = tempfile.mkdtemp(prefix="engine-")  # short: paths of sockets may have 107 bytes
    socket = f"unix://{running}/docker.sock"
    argv = [
        dockerd,
        "--host",
        socket,
        "--data-root",
        folder / "data",
        "--exec-root",
        f"{running}/run",
        "--pidfile",
        folder / "pid",
    ]
    # A bridge of its own: an engine that is told to have none removes docker0, which the engine beside it needs.
    bridge = f"test{os.getpid() % 100000}"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    subprocess.run(["ip", "addr", "add", "198.18.0.1/24", "dev", bridge], check=True)
    argv += [f"--bridge={bridge}", "--iptables=false", "--ip6tables=false"]
    (folder / "daemon.json").write_text(json.dumps({"features": features}))
    with (folder / "log").open("w") as log:
        beside = f"{Path(dockerd).parents[1]}/bin:{os.environ['PATH']}:/usr/sbin"  # its own containerd first
        daemon = subprocess.Popen(
            [*argv, "--config-file", folder / "daemon.json"], stdout=log, stderr=log, env={**os.environ, "PATH": beside}
        )
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
        for mounted in (folder / "data", Path(running) / "run"):  # an engine that failed to start leaves its mounts
            while subprocess.run(["umount", mounted], capture_output=True, check=False).returncode == 0:
                pass
        subprocess.run(["ip", "link", "delete", bridge], check=False)
        shutil.rmtree(folder / "data", ignore_errors=True)
        shutil.rmtree(running, ignore_errors=True)
