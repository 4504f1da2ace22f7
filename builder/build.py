"""Build one image: context, extension wheels, warm caches, final image. Nothing half-made stays behind.

BuildKit runs up to four times on one context, so that later runs are served from its cache: the extension wheels go into the
store, the kernel cache's name and the facts that labels need come out, and only then is the image made and tagged.
"""

import json
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder.engine import docker, environment, host, scratch
from builder.engine.process import Runner, network_failed
from builder.errors import BudgetError, BuildError, CommandError, HashMismatchError, InterruptedBuildError, NetworkError
from builder.values import Image, Lock, checksum

LABEL = "io.blackwell."
Say = Callable[[str], None]

_STEP = re.compile(r"^#(\d+) \[(?P<stage>[^\]]+?)\s*(\d+/\d+)?\] (?P<command>.*)$")
_LAYER = re.compile(r"source=layers/([\w-]+).*/install\.sh /opt/layer")
# What a step that takes minutes says of its own progress: the warming's lines, and the compiler's.
_TOLD = re.compile(
    r"^#\d+ [\d.]+ +(?P<text>blackwell (?:warm|check) \[\d+/\d+\] .*|compiling \S+ with .*|Building wheel .*still running.*)$"
)
_DONE = re.compile(r"^#(\d+) (?:DONE (?P<seconds>[\d.]+)s|CACHED)$")


@dataclass(kw_only=True)
class Progress:
    """Follows BuildKit's plain output: says each step once, what a long one tells of itself, and adds up seconds by stage."""

    say: Say
    seconds: dict[str, float] = field(default_factory=dict)
    _stages: dict[str, str] = field(default_factory=dict)
    _announced: set[str] = field(default_factory=set)

    def line(self, text: str) -> None:
        """Take one line of BuildKit's output."""
        if step := _STEP.match(text):
            stage = step["stage"].split()[0]
            self._stages[step[1]] = stage
            if step[1] not in self._announced and stage != "internal":
                self._announced.add(step[1])
                command = re.sub(r"--mount=\S+\s*|\\|\s{2,}", "", step["command"])
                layer = _LAYER.search(step["command"])  # the steps that install distributions all look alike
                self.say(f"{stage}: installing {layer[1]}" if layer else f"{stage}: {command[:110]}")
        elif told := _TOLD.match(text):
            self.say(told["text"])
        elif done := _DONE.match(text):
            stage = self._stages.get(done[1], "")
            if stage and stage != "internal":
                self.seconds[stage] = self.seconds.get(stage, 0.0) + float(done["seconds"] or 0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything that one build is made from: the image, its lock, the rendered files and the directories that go in."""

    image: Image
    lock: Lock
    files: Mapping[str, str]
    inside: Path
    scripts: Path

    @property
    def inputs(self) -> str:
        """Checksum of all inputs; an image that carries it as a label needs no build."""
        trees = {
            str(p.relative_to(t)): p.read_bytes().hex()
            for t in (self.inside, self.scripts)
            for p in sorted(t.rglob("*"))
            if p.is_file() and not any(map(_is_by_product, p.relative_to(t).parts))
        }
        return checksum([dict(self.files), trees, [str(c) for c in self.image.capabilities]])

    def wheel_key(self, gencode: str) -> str:
        """Key of the compiled extensions: sources, torch, CUDA compiler, base (with its C++ compiler and Python), flags."""
        compiled_with = [
            (d.name, d.version, d.hashes)
            for d in self.lock.distributions
            if d.layer in ("extensions", "compiler", "cuda", "cudnn", "torch")
        ]
        scripts = [
            (self.scripts / "extensions" / name).read_text(encoding="utf-8") for name in ("extensions.sh", "nvcc")
        ]
        key = checksum(
            [
                compiled_with,
                self.lock.base,
                [(p.name, p.version) for p in self.lock.debian],
                gencode,
                scripts,
                self.lock.platform,
            ]
        )
        return key.removeprefix("sha256:")[:16]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a build ended with. `seconds` is by stage; an unchanged image has none."""

    image: Image
    digest: str
    built: bool
    seconds: Mapping[str, float]


def _is_by_product(name: str) -> bool:
    """What tools leave in a source tree (__pycache__, .mypy_cache, an editor's .x.swp): never part of an image, nor of its inputs."""
    return name == "__pycache__" or name.startswith(".")


def unchanged(engine: docker.Engine, work: Work) -> str | None:
    """Digest of the local image if it was built from exactly these inputs, else None."""
    found = docker.inspect(engine, work.image.tag)
    labels = (found or {}).get("Config", {}).get("Labels") or {}
    return str(found["Id"]) if found and labels.get(LABEL + "inputs") == work.inputs else None


def build(
    run: Runner, engine: docker.Engine, work: Work, *, rootfs: Path | None, uv: Path, gencode: str, say: Say, log: Path
) -> Result:
    """Build and tag the image.

    `rootfs` is the archive of a bootstrapped base (None for a base by reference), `uv` the tool for the image's platform,
    `log` receives the full output. Raises BuildError (or a subclass that names the cause), BusyError, InterruptedBuildError.
    """
    store = host.store()
    with ExitStack() as stack:
        stack.enter_context(host.exclusive(work.image.id))
        if digest := unchanged(engine, work):  # somebody else has just built it
            return Result(image=work.image, digest=digest, built=False, seconds={})
        folder = stack.enter_context(scratch.directory())
        log.parent.mkdir(parents=True, exist_ok=True)
        output = stack.enter_context(log.open("w", encoding="utf-8"))
        progress = Progress(say=say)

        def on_line(line: str) -> None:
            output.write(line + "\n")
            output.flush()
            progress.line(line)

        context, secrets = folder / "context", secrets_of(run, folder)
        write_context(context, work, rootfs, uv)
        resources = host.resources(engine.root)
        arguments = {"GENCODE": gencode, "JOBS": str(resources.jobs), "EXTENSIONS": "store"}

        def request(target: str, **more: Any) -> None:
            docker.build(
                run, engine, docker.BuildRequest(context=context, target=target, secrets=secrets, **more), on_line
            )

        try:
            if work.lock.layer("extensions"):
                wheels = store / "wheels" / work.wheel_key(gencode)
                if not _whole(wheels):
                    say(
                        f"compiling extensions with {resources.jobs} jobs ({resources.cores} cores, {resources.memory / host.GB:.0f} GB of memory)"
                    )
                    fresh = folder / "wheels"
                    request("extensions-wheels", output=fresh, arguments={**arguments, "EXTENSIONS": "compile"})
                    _keep(fresh, wheels)
                shutil.copytree(wheels, context / "wheels", dirs_exist_ok=True)
            answers = folder / "answers"
            request("fingerprint", output=answers, arguments=arguments)
            arguments["FINGERPRINT"] = (answers / "fingerprint").read_text(encoding="utf-8").strip()
            request("report", output=answers, arguments=arguments)
            warm = json.loads((answers / "summary.json").read_text(encoding="utf-8"))
            request("final", tag=work.image.tag, arguments=arguments, labels=labels(work, warm))
        except CommandError as error:
            raise _explain(error, log) from error
        except KeyboardInterrupt as stop:
            raise InterruptedBuildError(
                f"interrupted; no image {work.image.tag} was made, finished steps stay in Docker's build cache",
                hint="the same command goes on from there",
            ) from stop
        found = docker.inspect(engine, work.image.tag)
        assert found is not None
        return Result(image=work.image, digest=str(found["Id"]), built=True, seconds=progress.seconds)


def labels(work: Work, warm: Mapping[str, Any]) -> dict[str, str]:
    """OCI labels of the image: what it is, what is warm in it, and what it was made from."""
    image, lock = work.image, work.lock
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(lock.epoch))
    oci = {
        "title": f"Blackwell training image, torch {image.stack.torch}, Triton {image.stack.triton}",
        "version": image.id,
        "created": created,
        "base.name": image.base.reference or f"debian:{image.base.suite}",
    }
    own = {
        "id": image.id,
        "inputs": work.inputs,
        "lock": lock.checksum,
        "capabilities": ",".join(str(c) for c in image.capabilities),
        "driver-floor": image.stack.driver_floor,
        **{f"version.{k}": v for k, v in image.versions.items()},
        **{f"{k}": str(v) for k, v in warm.items()},
        **({"override": f"triton {image.stack.triton} for {image.stack.triton_pin}"} if image.stack.override else {}),
        **({"warnings": ",".join(r.id for r in image.warnings)} if image.warnings else {}),
    }
    return {**{f"org.opencontainers.image.{k}": v for k, v in oci.items()}, **{LABEL + k: v for k, v in own.items()}}


def check_budget(image: Image, size: int, budget: int) -> None:
    """Raise BudgetError when an image's compressed size (bytes) exceeds its row's budget, or the matrix's where the row has none."""
    budget = image.stack.budget_zstd_bytes or budget
    if budget and size > budget:
        raise BudgetError(
            f"{image.tag} is {size / host.GB:.2f} GB with zstd, the budget of the matrix is {budget / host.GB:.2f} GB",
            hint="see the layers with `builder report`; prune more in builder/layout/prune.toml, or raise the budget",
        )


def secrets_of(run: Runner, folder: Path) -> dict[str, Path]:
    """Files with what the host knows of indexes, proxies and certificates; empty where it knows nothing."""
    network = folder / "network"
    network.write_text(environment.secret_script(run), encoding="utf-8")
    network.chmod(0o600)
    nothing = folder / "nothing"
    nothing.touch()
    return {
        "network": network,
        "ca": environment.ca_bundle() or nothing,
        "netrc": environment.netrc() or nothing,
        "uv": environment.uv_configuration() or nothing,
    }


def write_context(context: Path, work: Work, rootfs: Path | None, uv: Path) -> None:
    """Write the build context: rendered files, our code, the build scripts with uv, an empty wheel store, and the base's archive."""
    for name, text in work.files.items():
        path = context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for tree, name in ((work.inside, "inside"), (work.scripts, "build")):
        shutil.copytree(tree, context / name, ignore=lambda _, names: [n for n in names if _is_by_product(n)])
    shutil.copy2(uv, context / "build" / "install" / "uv")
    (context / "wheels").mkdir()
    if rootfs:
        (context / "rootfs.tar").hardlink_to(rootfs) if rootfs.stat().st_dev == context.stat().st_dev else shutil.copy2(
            rootfs, context / "rootfs.tar"
        )


def _keep(fresh: Path, kept: Path) -> None:
    """Move a directory into the store, whole or not at all."""
    with scratch.directory(kept.parent) as work:
        shutil.copytree(fresh, work / "tree")
        if kept.exists():  # damaged, or another build of the same wheels was faster
            kept.rename(work / "before")
        (work / "tree").rename(kept)


def _whole(wheels: Path) -> bool:
    """Are wheels there, none of them cut off? Their table of contents is at their end."""
    found = list(wheels.glob("*.whl"))
    return bool(found) and all(map(zipfile.is_zipfile, found))


def _explain(error: CommandError, log: Path) -> BuildError:
    """The build's failure in one sentence: which step, its last lines, and the cause where it is a known one."""
    lines = [line for line in error.output.splitlines() if line.startswith("#")]
    failed = next((m[1] for m in (re.match(r"^#(\d+) ERROR", line) for line in reversed(lines)) if m), "")
    said = [re.sub(r"^#\d+ (?:[\d.]+ )?", "", line) for line in lines if failed and line.startswith(f"#{failed} ")]
    tail = "\n".join(f"  {line}" for line in (said or error.output.splitlines())[-15:])
    text = "\n".join(said) or error.output
    known: tuple[tuple[type[BuildError], str, str, bool], ...] = (
        (
            HashMismatchError,
            "a downloaded distribution differs from the lock",
            "don't trust that index; or refresh the lock with `builder lock`",
            "Hash mismatch" in text or "DO NOT MATCH THE HASHES" in text,
        ),
        (
            NetworkError,
            "the network or the index went away",
            "check the network, then run the same command: finished steps are kept",
            network_failed(text),
        ),
    )
    for kind, cause, hint, fits in known:
        if fits:
            return kind(f"the build stopped: {cause}\n{tail}", hint=f"{hint} (full output: {log})")
    if "no space left on device" in error.output.lower():
        return BuildError(
            f"the build stopped: the disk is full\n{tail}",
            hint="free some with `docker builder prune`, then run the same command",
        )
    return BuildError(f"a step of the build failed:\n{tail}", hint=f"the full output is in {log}")
