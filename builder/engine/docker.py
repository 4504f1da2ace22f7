"""Docker Engine: find it, install and start it where we may, and drive it.

The docker SDK asks and tags; builds go through the `docker` command, because the SDK cannot drive BuildKit
(https://github.com/docker/docker-py/issues/2230; the command can go when that is closed).
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
from packaging.version import InvalidVersion, Version

from builder.engine.process import Runner, network_failed
from builder.errors import CommandError, EngineError, EngineTooOldError, NetworkError, NoImageError

MINIMUM = "20.10"
DEBIAN_CLIENT = Path("/usr/bin/docker")
DAEMON_LOG = Path("/var/log/builder-dockerd.log")
PID_FILES = {Path("/var/run/docker.pid"): "dockerd", Path("/var/run/docker/containerd/containerd.pid"): "containerd"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A running Docker Engine and the docker command that can drive its BuildKit."""

    client: Path
    version: str
    root: Path
    platform: str

    @property
    def api(self) -> docker.DockerClient:
        """A fresh SDK client (environment variables of docker apply)."""
        return docker.from_env(timeout=600)


def probe(run: Runner) -> Engine | None:
    """The running engine, or None. Raises EngineTooOldError, or EngineError if no docker command can use BuildKit."""
    try:
        api = docker.from_env(timeout=20)
        facts, info = api.version(), api.info()
    except (docker.errors.DockerException, OSError):
        return None
    except (AttributeError, TypeError, ValueError) as error:  # the SDK trusts the user's files
        raise EngineError(
            f"the settings of the docker command can't be read: {error}",
            hint="mend config.json in ~/.docker, or in the directory that DOCKER_CONFIG names",
        ) from error
    number = re.match(r"\d+(\.\d+)*", facts["Version"])  # a build of one's own may be called "dev": then it is new
    if number and Version(number[0]) < Version(MINIMUM):
        raise EngineTooOldError(
            f"Docker Engine {facts['Version']} is running; builds need {MINIMUM} or newer, the first with a complete BuildKit",
            hint="upgrade Docker Engine, or set DOCKER_HOST to a newer one",
        )
    return Engine(
        client=find_client(run),
        version=facts["Version"],
        root=Path(info["DockerRootDir"]),
        platform=f"{facts['Os']}/{facts['Arch']}",
    )


def find_client(run: Runner) -> Path:
    """A docker command that can use BuildKit: one with the buildx plugin, or older than 23 with BuildKit built in."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin"]
    for client in dict.fromkeys(Path(f) / "docker" for f in folders if f):
        if not os.access(client, os.X_OK):
            continue
        try:
            version = run([client, "version", "--format", "{{.Client.Version}}"]).strip()
            if Version(version.split("+")[0]) < Version("23"):
                return client
            run([client, "buildx", "version"])
        except (CommandError, InvalidVersion):  # broken, or something else of that name
            continue
        return client
    raise EngineError(
        "no docker command here can use BuildKit: those found are newer than 22 and have no buildx plugin",
        hint="install Debian's docker.io, or the docker-buildx plugin",
    )


def ensure(run: Runner, say: Callable[[str], None]) -> Engine:
    """The running engine; on Debian or Ubuntu with root, one is installed and started if there is none.

    Raises EngineError in one sentence where that is not possible.
    """
    if engine := _probe_after_installing(run, say):
        return engine
    if os.environ.get("DOCKER_HOST"):
        raise EngineError(
            f"no Docker Engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}",
            hint="start it, or unset DOCKER_HOST to use one on this machine",
        )
    if os.geteuid() != 0:
        raise EngineError(
            "no Docker Engine is running, and without root none can be installed or started",
            hint="start Docker, or run this once as root",
        )
    install(run, say, ("docker.io",) if not shutil.which("dockerd") else ())
    say("starting Docker Engine")
    _start(run)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if engine := probe(run):
            return engine
        time.sleep(0.5)
    tail = (
        "\n".join(DAEMON_LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
        if DAEMON_LOG.exists()
        else "it left no log"
    )
    raise EngineError(
        f"Docker Engine was started but does not answer after 60 s; the end of {DAEMON_LOG}:\n{tail}",
        hint="mend what it says, or start Docker by hand; then run the same command again",
    )


def _probe_after_installing(run: Runner, say: Callable[[str], None]) -> Engine | None:
    try:
        return probe(run)
    except EngineTooOldError:
        raise
    except EngineError:
        # Debian's docker.io would upgrade what is there, or replace another vendor's packages, and restart the engine.
        if os.geteuid() or not shutil.which("apt-get") or DEBIAN_CLIENT.exists():
            raise
        install(run, say, ("docker.io",))  # an engine runs, but no docker command fits it
        return probe(run)


def install(run: Runner, say: Callable[[str], None], packages: Sequence[str]) -> None:
    """Install Debian packages on this host. Raises EngineError off Debian and Ubuntu, NetworkError without a network."""
    if not packages:
        return
    if not shutil.which("apt-get"):
        raise EngineError(
            f"this host lacks {', '.join(packages)}, and only Debian and Ubuntu hosts are set up by this tool",
            hint="install them by hand",
        )
    if os.geteuid() != 0:
        raise EngineError(
            f"this host lacks {', '.join(packages)}, and installing them needs root",
            hint=f"run `sudo apt-get install {' '.join(packages)}` once",
        )
    say(f"installing {', '.join(packages)} from Debian's packages")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "-q"], env=quiet)
        run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages], env=quiet)
    except CommandError as error:
        if network_failed(error.output):
            raise NetworkError(
                f"{', '.join(packages)} can't be fetched from Debian's packages:\n{error.message}",
                hint="check the network and apt's sources, or install them by hand; then run the same command again",
            ) from error
        raise


def require_tools(run: Runner, say: Callable[[str], None], tools: Mapping[str, str]) -> None:
    """Install what is missing of `tools` (program -> Debian package)."""
    install(run, say, [package for program, package in tools.items() if not shutil.which(program)])


def _start(run: Runner) -> None:
    if Path("/run/systemd/system").is_dir():
        run(["systemctl", "start", "docker"])
        return
    for path, program in PID_FILES.items():
        drop_stale_pid_file(path, program)
    DAEMON_LOG.parent.mkdir(parents=True, exist_ok=True)
    with DAEMON_LOG.open("ab") as log:  # a daemon of its own session: it outlives this command, as a service would
        subprocess.Popen(["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def drop_stale_pid_file(path: Path, program: str) -> None:
    """Remove a process id file whose process is another program by now: a killed daemon's, which its successor trips over."""
    try:
        running = Path(f"/proc/{int(path.read_text(encoding='utf-8'))}/comm").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        running = ""
    except (OSError, ValueError):
        return
    if running != program:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One run of BuildKit. `secrets` maps an id to a file; `output` is a directory for the result instead of an image."""

    context: Path
    target: str
    tag: str = ""
    output: Path | None = None
    arguments: Mapping[str, str] | None = None
    labels: Mapping[str, str] | None = None
    secrets: Mapping[str, Path] | None = None
    network: str = ""


def build(run: Runner, engine: Engine, request: BuildRequest, on_line: Callable[[str], None]) -> None:
    """Run BuildKit on a rendered context; the image or output appears only when all of it succeeded. Raises CommandError."""
    argv: list[str | Path] = [engine.client, "build", "--progress=plain", "--target", request.target]
    for option, pairs in (("--build-arg", request.arguments), ("--label", request.labels)):
        for key, value in (pairs or {}).items():
            argv += [option, f"{key}={value}"]
    for key, path in (request.secrets or {}).items():
        argv += ["--secret", f"id={key},src={path}"]
    if request.network:
        argv += ["--network", request.network]
    argv += ["--output", f"type=local,dest={request.output}"] if request.output else ["--tag", request.tag]
    run([*argv, request.context], env={"DOCKER_BUILDKIT": "1"}, on_line=on_line)


def labels(engine: Engine, reference: str) -> dict[str, str] | None:
    """Labels of a local image, or None if there is no such image."""
    found = inspect(engine, reference)
    return None if found is None else dict(found["Config"].get("Labels") or {})


def existing(engine: Engine, reference: str, how: str = "") -> dict[str, Any]:
    """What the engine knows of a local image. Raises NoImageError, with `how` to get it, if there is none."""
    found = inspect(engine, reference)
    if found is None:
        raise NoImageError(f"there is no image {reference} here", hint=how or "build it first, or pull it")
    return found


def inspect(engine: Engine, reference: str) -> dict[str, Any] | None:
    """What the engine knows of a local image, or None if there is no such image."""
    try:
        return dict(engine.api.images.get(reference).attrs)
    except docker.errors.ImageNotFound:
        return None
