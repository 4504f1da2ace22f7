"""Joins the rooms for the command line: matrix -> plan -> lock -> render -> build. Files of the repository are opened here."""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from builder import arch, build, layout, lock, matrix, plan, render, verify
from builder.engine import debian, docker, host, scratch, uv
from builder.engine.places import variable
from builder.engine.process import Runner
from builder.errors import (
    CommandError,
    EngineError,
    FileError,
    LockMissingError,
    LockStaleError,
    SelectionError,
    VerifyError,
)
from builder.inside_data import cards_for
from builder.values import DebianPackage, Image, Lock, Matrix

HOST_TOOLS = {"mmdebstrap": "mmdebstrap", "zstd": "zstd"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@dataclass(frozen=True, kw_only=True)
class Project:
    """Where the repository's own files lie."""

    root: Path

    @classmethod
    def find(cls) -> "Project":
        """The repository: BUILDER_ROOT, else the one that this package lies in. Raises FileError if it isn't there."""
        root = Path(variable("BUILDER_ROOT") or Path(__file__).resolve().parent.parent).absolute()
        if not (root / "matrices").is_dir():
            raise FileError(
                f"{root} is no checkout of this repository: it has no directory matrices",
                hint="run builder from its checkout's virtual environment, or set BUILDER_ROOT to a checkout",
            )
        return cls(root=root)

    @property
    def matrices(self) -> Path:
        """Directory of the matrix files and locks."""
        return self.root / "matrices"

    @property
    def inside(self) -> Path:
        """Directory of the code that goes into images."""
        return self.root / "builder" / "inside"

    @property
    def scripts(self) -> Path:
        """Directory of the scripts that build steps run."""
        return self.root / "builder" / "layout" / "build"

    def template(self) -> str:
        """Text of the Dockerfile template."""
        return (self.root / "Dockerfile.j2").read_text(encoding="utf-8")

    def lock_path(self, image: Image) -> Path:
        """Where an image's lock lies."""
        return self.matrices / "locks" / f"{image.lock_name}.lock.toml"

    def matrix(self) -> Matrix:
        """The version matrix. Raises MatrixError."""
        return matrix.load(self.matrices)

    def log_path(self, image: Image) -> Path:
        """Where the full output of an image's build goes."""
        return host.store() / "logs" / f"{image.id}.log"


def choose(project: Project, request: plan.Request) -> Image:
    """The image that a request means."""
    return plan.resolve(project.matrix(), request)


def locked_rows(project: Project) -> list[tuple[Image, bool]]:
    """The images of linux/amd64 that have a lock, each with: is it what its Triton's prefix alone means?"""
    known = project.matrix()
    images = [i for i in plan.resolve_all(known, plan.Request()) if project.lock_path(i).exists()]
    meant = {}
    for short in {".".join(i.stack.triton.split(".")[:2]) for i in images}:
        with contextlib.suppress(SelectionError):
            meant[short] = plan.resolve(known, plan.Request(triton=short)).lock_name
    return [(i, i.lock_name in meant.values()) for i in images]


def read_lock(project: Project, image: Image) -> Lock:
    """The image's lock, checked against its present inputs. Raises LockMissingError or LockStaleError."""
    path = project.lock_path(image)
    if not path.exists():
        raise LockMissingError(
            f"{image.lock_name} has no lock", hint=f"make it with `builder lock --id {image.lock_name}` and commit it"
        )
    found = lock.loads(path.read_bytes(), where=str(path.relative_to(project.root)))
    lock.check(found, image, layout.layers())
    return found


def make_lock(run: Runner, project: Project, image: Image, say: Callable[[str], None]) -> Lock:
    """Resolve an image anew and write its lock, whole or not at all."""
    say(f"resolving {image.lock_name}")
    packages: tuple[DebianPackage, ...] = ()
    if not image.base.reference:
        require_host_tools(run, say)
        packages = debian.simulate(run, image.base, image.arch)
    resolver = partial(uv.resolve, run, python=image.base.python, platform=image.platform)
    fresh = lock.make(image, layout.layers(), resolver, packages, _epoch(project, image, packages))
    path = project.lock_path(image)
    scratch.write(path, lock.dumps(fresh))
    return fresh


def _epoch(project: Project, image: Image, packages: tuple[DebianPackage, ...]) -> int:
    """The time stamp of a lock: that of an older lock with the same base, so that their images share its layers; else now."""
    for path in sorted((project.matrices / "locks").glob("*.lock.toml")):
        with contextlib.suppress(LockStaleError, OSError):
            other = lock.loads(path.read_bytes(), where=path.name)
            base = image.base.reference or image.base.name
            if (other.base, other.platform, other.debian) == (base, image.platform, packages):
                return other.epoch
    named = variable("SOURCE_DATE_EPOCH") or str(int(time.time()))
    if not named.isascii() or not named.isdigit() or int(named[:13]) >= lock.LATEST:
        raise SelectionError(
            f"SOURCE_DATE_EPOCH={named[:40]} is no time in seconds since 1970", hint="set it to a number, or unset it"
        )
    return int(named)


def render_context(project: Project, image: Image, locked: Lock) -> Mapping[str, str]:
    """All rendered files of the image's build context."""
    return render.context(
        project.template(), image, locked, layout.removals(), cards_for(project.inside, image.capabilities)
    )


def require_host_tools(run: Runner, say: Callable[[str], None]) -> None:
    """Install the host's own tools where they are missing."""
    docker.require_tools(run, say, HOST_TOOLS)
    if not KEYRING.exists():
        docker.install(run, say, ("debian-archive-keyring",))


def work_of(project: Project, image: Image, locked: Lock) -> build.Work:
    """What a build of the image is made from."""
    return build.Work(
        image=image,
        lock=locked,
        files=render_context(project, image, locked),
        inside=project.inside,
        scripts=project.scripts,
    )


def build_image(run: Runner, project: Project, image: Image, say: Callable[[str], None]) -> build.Result:
    """Build an image from its lock, or find that it is there unchanged."""
    locked = read_lock(project, image)
    work = work_of(project, image, locked)
    engine = docker.ensure(run, say)
    if engine.platform != image.platform:
        raise EngineError(
            f"{image.id} is for {image.platform}, and this Docker Engine is for {engine.platform}",
            hint=f"set DOCKER_HOST to an engine on {image.platform}, or give the work to such a builder with `builder bake`",
        )
    if digest := build.unchanged(engine, work):
        return build.Result(image=image, digest=digest, built=False, seconds={})
    host.check_resources(host.resources(engine.root))
    rootfs, tool = base_and_tool(run, image, locked, say)
    return build.build(
        run,
        engine,
        work,
        rootfs=rootfs,
        uv=tool,
        gencode=arch.gencode(image.capabilities),
        say=say,
        log=project.log_path(image),
    )


def base_and_tool(run: Runner, image: Image, locked: Lock, say: Callable[[str], None]) -> tuple[Path | None, Path]:
    """The archive of a bootstrapped base (None for one by reference), and uv for the image's platform."""
    require_host_tools(run, say)
    store = host.store()
    rootfs = None
    if not image.base.reference:
        say(f"base: bootstrapping {image.base.suite} from Debian packages")
        rootfs = debian.locked_rootfs(run, image.base, image.arch, locked.epoch, locked.debian, store / "bases")
    tool = uv.tool(
        run,
        lock.requirements_text(locked.layer("tools")),
        python=image.base.python,
        platform=image.platform,
        store=store / "tools",
    )
    return rootfs, tool


def verify_image(run: Runner, project: Project, image: Image, say: Callable[[str], None]) -> verify.Verdict:
    """Run tests/image on the image and keep the verdict, bound to its digest. Raises NoImageError if there is none."""
    engine = docker.ensure(run, say)
    found = docker.existing(engine, image.tag, f"build it first with `builder build --id {image.id}`")
    with scratch.directory() as work:
        report = work / "report.xml"
        argv: list[str | Path] = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            project.root / "tests" / "image",
            "--image",
            image.tag,
            f"--junit-xml={report}",
        ]
        with contextlib.suppress(CommandError):  # failing tests are the verdict's to tell
            run(argv, cwd=project.root, on_line=say)
        if not report.exists():
            raise VerifyError(f"the tests of {image.tag} did not run to their end", hint="see the lines above")
        tests = verify.read_junit(report.read_text(encoding="utf-8"))
    labels = found["Config"].get("Labels") or {}
    verdict = verify.Verdict(
        id=image.id, digest=str(found["Id"]), lock=labels.get(build.LABEL + "lock", ""), tests=tests
    )
    path = verdict_path(verdict.digest)
    scratch.write(path, verdict.dumps())
    return verdict


def verdict_path(digest: str) -> Path:
    """Where the verdict on a digest lies."""
    return host.store() / "verdicts" / f"{digest.removeprefix('sha256:')}.json"
