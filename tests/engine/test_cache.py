"""Nothing is done twice: an unchanged image needs no build, a changed row only its own layers, images on one base share it.

The images that `make test` has built; a changed row is built up to its distributions, on the same engine.
"""

import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import arch, build, flow, plan
from builder.engine import docker, host
from builder.engine.process import run
from builder.values import Image
from tests.engine.conftest import Small

SOCKET = Path("/var/run/docker.sock")
FLA_ROW = "cu130-torch2.12.1-triton3.7.1-fla0.5.2-conv1d1.7.0-py313-trixie"


def built(small: Small, triton: str) -> Image:
    image = flow.choose(small.project, plan.Request(triton=triton, capabilities=("12.0",)))
    docker.existing(small.engine, image.tag, "`make test` builds it first")
    return image


class Recorder(socketserver.ThreadingUnixStreamServer):
    """Passes everything on to the engine's socket, and keeps the first line of every HTTP request."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.requests: list[str] = []
        super().__init__(str(path), _Pass)


class _Pass(socketserver.BaseRequestHandler):
    server: Recorder

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(str(SOCKET))
            back = threading.Thread(target=self._answers, args=(engine,), daemon=True)
            back.start()
            while data := self.request.recv(1 << 16):
                self.server.requests += re.findall(
                    r"(?m)^((?:GET|POST|PUT|DELETE|HEAD) \S+) HTTP", data.decode("latin-1")
                )
                engine.sendall(data)
            engine.shutdown(socket.SHUT_WR)
            back.join(5)

    def _answers(self, engine: socket.socket) -> None:
        try:
            while data := engine.recv(1 << 16):
                self.request.sendall(data)
        except OSError:  # the client has left
            pass


@pytest.fixture
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    server = Recorder(tmp_path_factory.mktemp("s") / "docker.sock")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asks_builder(request: str) -> bool:
    """BuildKit is reached by POST /build and by sessions; /version and /images are questions."""
    return bool(re.search(r"/(build|session|grpc)\b", request))


def test_unchanged_image_is_not_built(small: Small, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    image = built(small, "3.7")
    before = docker.inspect(small.engine, image.tag)
    command = [Path(sys.executable).with_name("builder"), "build", "--triton", "3.7", "--capability", "12.0", "--json"]
    monkeypatch.setenv("DOCKER_HOST", f"unix://{recorder.server_address}")
    started = time.monotonic()
    done = subprocess.run(command, cwd=small.project.root, capture_output=True, text=True, timeout=300, check=False)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    assert recorder.requests, "nothing was recorded, so nothing is shown"
    assert not [request for request in recorder.requests if asks_builder(request)]
    assert seconds < 5, f"{seconds:.1f} s\n{done.stderr}"
    assert docker.inspect(small.engine, image.tag) == before


def test_the_recorder_sees_a_build(
    small: Small, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or the test above could not fail."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{recorder.server_address}")
    docker.build(
        run, small.engine, docker.BuildRequest(context=tmp_path, target="", output=tmp_path / "out"), lambda _: None
    )
    assert [request for request in recorder.requests if asks_builder(request)]


def test_images_on_one_base_share_its_layers(small: Small) -> None:
    """The base, and every further layer up to the first in which the two locks differ."""
    images = [built(small, triton) for triton in ("3.7", "3.6")]
    layers = [small.engine.api.images.get(image.tag).attrs["RootFS"]["Layers"] for image in images]
    locks = [flow.read_lock(small.project, image) for image in images]
    same = [locks[0].layer(name) == locks[1].layer(name) for name in ("cuda", "cudnn", "triton", "torch")]
    expected = 2 + (same.index(False) if False in same else len(same))  # the file system, Python's environment
    shared = next(i for i, (a, b) in enumerate(zip(*layers, strict=False)) if a != b)
    assert shared == expected, (shared, same)


def test_another_fla_repeats_neither_downloads_nor_compiles(small: Small, tmp_path: Path) -> None:
    """Up to the stage with all distributions: CUDA's libraries, Triton, torch and the extension come from the cache."""
    steps = {}
    for name in ("0.6.0", "0.5.2"):
        image = flow.choose(small.project, plan.Request(triton="3.7", fla=name, capabilities=("12.0",)))
        work = flow.work_of(small.project, image, flow.read_lock(small.project, image))
        flags = arch.gencode(image.capabilities)
        wheels = host.store() / "wheels" / work.wheel_key(flags)
        assert wheels.is_dir(), f"{image.id} would compile its extension: {wheels} is not in the store"
        context = tmp_path / name
        build.write_context(context, work, small.rootfs, small.uv)
        subprocess.run(["cp", "-r", f"{wheels}/.", context / "wheels"], check=True)
        lines: list[str] = []
        request = docker.BuildRequest(
            context=context,
            target="runtime",
            tag=f"builder-test:fla{name}",
            secrets=build.secrets_of(run, tmp_path),
            arguments={"GENCODE": flags, "JOBS": "1", "EXTENSIONS": "store"},
        )
        docker.build(run, small.engine, request, lines.append)
        steps[name] = outcome_of_steps(lines)
    first, second = steps["0.6.0"], steps["0.5.2"]
    assert list(first) == list(second), "the same stages"
    ran = [step for step, cached in second.items() if not cached]
    last = max(step for step in second if step.startswith("runtime "))
    assert set(ran) <= {last}, f"only the last layer, FLA's, may be made: {ran}"
    assert not any("extensions-compile" in step for step in second)
    one, other = (small.engine.api.images.get(f"builder-test:fla{name}").attrs["RootFS"]["Layers"] for name in steps)
    assert one[:-1] == other[:-1] and one[-1] != other[-1]


def outcome_of_steps(lines: list[str]) -> dict[str, bool]:
    """BuildKit's RUN and ADD steps in order -> came from the cache."""
    steps = {m[1]: m[2] for m in (re.match(r"#(\d+) \[(.*?\d+/\d+)\] (?:RUN|ADD|COPY)", line) for line in lines) if m}
    cached = {m[1] for m in (re.match(r"#(\d+) CACHED", line) for line in lines) if m}
    return {name: number in cached for number, name in sorted(steps.items(), key=lambda pair: pair[1])}
