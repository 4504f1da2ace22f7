"""Joins the rooms for what happens after a build: publish, report, compare, hand over to other machines."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from builder import bake, build, flow, plan, provenance, publish, publish_files, report, sbom, show
from builder.engine import contents, docker, host, sizes, skopeo
from builder.engine.process import Runner
from builder.errors import DamagedError, PublishError, SelectionError
from builder.flow import Project
from builder.inside_data import cards_for
from builder.oci import Attachment
from builder.values import Image, Lock, Matrix, checksum
from builder.verify import Verdict

Say = Callable[[str], None]
WARM_TYPE = "application/vnd.blackwell.warm+json"
VERDICT_TYPE = "application/vnd.blackwell.verdict+json"
REPOSITORY = re.compile(r"[^/\s@]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
WARM_REPORT = r"opt/blackwell/cache/\w+/report\.json"


def short_tags(matrix: Matrix, image: Image) -> tuple[str, ...]:
    """The short tags that an image may carry: those for which it is the answer when nothing else is said.

    `triton3.7` means what `--triton 3.7` means; so an override, another FLA or an older torch doesn't move it. An image for
    fewer capabilities or another platform has short tags of its own, which end as its identifier does.
    """
    triton = ".".join(image.stack.triton.split(".")[:2])
    cuda = ".".join(image.stack.cuda.split(".")[:2])
    suffix = image.id.removeprefix(image.lock_name.removesuffix(f"-{image.arch}"))
    asked = {
        f"triton{triton}-cu{cuda.replace('.', '')}": plan.Request(triton=triton, cuda=cuda, platform=image.platform),
        f"triton{triton}": plan.Request(triton=triton, platform=image.platform),
    }
    found = []
    for tag, request in asked.items():
        try:
            meant = plan.resolve(matrix, request)
        except SelectionError:  # ambiguous: then no image has this tag by itself
            continue
        if meant.lock_name == image.lock_name:
            found.append(tag + suffix)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A local image with all that is known of it: what the engine says, its lock, its verdict, and its contents."""

    image: Image
    lock: Lock
    digest: str
    labels: Mapping[str, str]
    layers: tuple[str, ...]
    verdict: Verdict | None
    contents: contents.Contents

    @property
    def created(self) -> str:
        """When its lock was made, which is the time that everything about it carries (RFC 3339)."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.lock.epoch))

    def warm(self) -> dict[str, Any]:
        """The report of what is warm in it; empty if it has none."""
        return dict(json.loads(self.contents.text(WARM_REPORT) or "{}"))


def read_verdict(digest: str) -> Verdict | None:
    """The verdict on a digest, or None. Raises VerifyError if it is damaged."""
    try:
        return Verdict.loads(flow.verdict_path(digest).read_bytes())
    except FileNotFoundError:
        return None


def subject_of(engine: docker.Engine, image: Image, locked: Lock, say: Say) -> Subject:
    """Look at a built image. Raises PublishError if it isn't there."""
    found = docker.existing(engine, image.tag, f"build it first with `builder build --id {image.id}`")
    digest = str(found["Id"])
    say(f"reading the contents of {image.tag}")
    return Subject(
        image=image,
        lock=locked,
        digest=digest,
        labels=dict(found["Config"].get("Labels") or {}),
        layers=tuple(found["RootFS"]["Layers"]),
        verdict=read_verdict(digest),
        contents=contents.local(engine, image.tag, host.store()),
    )


def documents_of(project: Project, engine: docker.Engine, subject: Subject, manifest: str) -> tuple[Attachment, ...]:
    """What is attached to an image: bill of materials, provenance, the tests' verdict, and what is warm."""
    image, locked, inputs = subject.image, subject.lock, subject.labels.get(build.LABEL + "inputs", "")
    unchanged = flow.work_of(project, image, locked).inputs == inputs
    bill = sbom.make(image, locked, subject.digest, subject.contents.texts, version("builder"))
    statement = provenance.make(
        image,
        locked,
        manifest=manifest,
        digest=subject.digest,
        inputs=inputs,
        template=checksum(project.template()) if unchanged else "",
        engine=engine.version,
        version=version("builder"),
        environment=os.environ,
    )
    made = [
        Attachment(name="sbom.cdx.json", media_type=sbom.MEDIA_TYPE, data=bill),
        Attachment(name="provenance.intoto.json", media_type=provenance.MEDIA_TYPE, data=statement, once=True),
    ]
    if subject.verdict:
        made.append(Attachment(name="verdict.json", media_type=VERDICT_TYPE, data=subject.verdict.dumps().encode()))
    if warm := subject.contents.text(WARM_REPORT):
        made.append(Attachment(name="warm.json", media_type=WARM_TYPE, data=warm.encode()))
    return tuple(made)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Where and how to publish: HOST/REPO, oci:DIRECTORY or FILE.tar; further tags; compression; cosign's key."""

    to: str
    access: skopeo.Access
    tags: tuple[str, ...] = ()
    compression: str = "gzip"
    key: str = ""

    def check(self, *, files: bool = True) -> None:
        """Raise PublishError for a place or a tag that can't be, before any work is done. `files`: is a layout or archive a place?"""
        is_file = files and (re.fullmatch(r"oci:.+", self.to) or self.to.endswith(".tar"))
        if not is_file and not REPOSITORY.fullmatch(self.to.removeprefix("docker://")):
            also = ", oci:DIRECTORY or FILE.tar" if files else ""
            raise PublishError(
                f"{self.to!r} is no place to publish to", hint=f"give HOST/REPO (lower case, no tag){also}"
            )
        if wrong := [tag for tag in self.tags if not TAG.fullmatch(tag)]:
            raise PublishError(
                f"{wrong[0]!r} is no tag",
                hint="at most 128 letters, digits, dots, dashes and underlines, not beginning with a dot or dash",
            )


def publish_image(run: Runner, project: Project, image: Image, wish: Wish, say: Say) -> publish.Outcome:
    """Publish a built and verified image. Raises PublishError; nothing is tagged then."""
    wish.check()
    engine = docker.ensure(run, say)
    found = docker.existing(engine, image.tag, f"build it first with `builder build --id {image.id}`")
    locked = flow.read_lock(project, image)
    publish.check(read_verdict(str(found["Id"])), image.id, str(found["Id"]), locked.checksum)
    skopeo.require(run, say)
    subject = subject_of(engine, image, locked, say)
    tags = (image.id, *short_tags(project.matrix(), image), *wish.tags)
    release = publish.Release(
        name=image.id,
        digest=subject.digest,
        layers=subject.layers,
        tags=tuple(dict.fromkeys(tags)),
        created=subject.created,
        annotations={k: v for k, v in sorted(subject.labels.items()) if k.startswith("org.opencontainers.image.")},
        documents=lambda manifest: documents_of(project, engine, subject, manifest),
    )
    if wish.to.startswith("oci:"):
        return publish_files.to_layout(run, engine, release, Path(wish.to[4:]), say, compression=wish.compression)
    if wish.to.endswith(".tar"):
        return publish_files.to_archive(run, engine, release, Path(wish.to), say, compression=wish.compression)
    name = wish.to.removeprefix("docker://")
    return publish.to_registry(run, engine, release, name, wish.access, say, compression=wish.compression, key=wish.key)


def report_of(run: Runner, project: Project, image: Image, benchmark: bytes, say: Say) -> report.Material:
    """Everything that a report on a built image tells. `benchmark`: a result of bench/first_step.py, or nothing.

    Raises NoImageError if the image isn't there, SelectionError if the benchmark is something else.
    """
    engine = docker.ensure(run, say)
    subject = subject_of(engine, image, flow.read_lock(project, image), say)
    try:
        measured = report.read_benchmark(benchmark) if benchmark else {}
    except ValueError as error:
        raise SelectionError(
            f"the benchmark can't be read: {error}", hint="give the first_step.json that bench/first_step.py wrote"
        ) from error
    say("measuring the layers")
    layers = sizes.measure(engine, image.tag, host.store())
    return report.Material(
        image=image,
        lock=subject.lock,
        digest=subject.digest,
        labels=subject.labels,
        verdict=subject.verdict,
        layers=layers,
        layer_names=show.layer_names(layers, subject.lock),
        cards=cards_for(project.inside, image.capabilities),
        warm=subject.warm(),
        bill=sbom.make(image, subject.lock, subject.digest, subject.contents.texts, version("builder")),
        benchmark=measured,
    )


def _summary(path: Path) -> dict[str, Any]:
    """What the group `report` answered. Raises DamagedError for half of it."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise DamagedError(
            f"{path} is damaged: {error}", hint=f"remove {path.parent}, then bake the group `fingerprint` again"
        ) from error


def bake_file(
    run: Runner, project: Project, images: Sequence[Image], folder: Path, wish: Wish, cache: str, say: Say
) -> dict[str, Any]:
    """Write the build contexts of some images below `folder`, and return the bake file for them.

    What earlier groups answered is looked for there too. Secrets lie beside the contexts, readable by their owner alone.
    """
    wish.check(files=False)
    if cache:
        Wish(to=cache, access=wish.access).check(files=False)
    jobs = []
    private = folder / "secrets"
    private.mkdir(parents=True, exist_ok=True, mode=0o700)
    secrets = {key: path.resolve() for key, path in build.secrets_of(run, private).items() if path.stat().st_size}
    for image in images:
        locked = flow.read_lock(project, image)
        work = flow.work_of(project, image, locked)
        context, answers = folder / "contexts" / image.id, folder / "answers" / image.id
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir(parents=True)
        rootfs, tool = flow.base_and_tool(run, image, locked, say)
        build.write_context(context, work, rootfs, tool)
        fingerprint, summary = answers / "fingerprint", answers / "summary.json"
        known = fingerprint.read_text(encoding="utf-8").strip() if fingerprint.exists() else ""
        made_for = answers / "inputs"  # answers count for the inputs that they were made from
        if known and (not made_for.exists() or made_for.read_text(encoding="utf-8") != work.inputs):
            shutil.rmtree(answers)
            known = ""
        answers.mkdir(parents=True, exist_ok=True)
        made_for.write_text(work.inputs, encoding="utf-8")
        labels = build.labels(work, _summary(summary)) if known and summary.exists() else None
        jobs.append(
            bake.Job(
                image=image,
                context=context.resolve(),
                answers=answers.resolve(),
                epoch=locked.epoch,
                secrets=secrets,
                fingerprint=known,
                labels=labels,
            )
        )
    return bake.bake(jobs, to=wish.to, cache=cache, compression=wish.compression)
