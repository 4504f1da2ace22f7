"""Publish a verified image into files: an OCI layout, or its archive; the documents about it lie beside."""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder import oci
from builder.engine import cosign, docker, scratch
from builder.engine.process import Runner
from builder.errors import PublishError
from builder.oci import Attachment, Layout
from builder.publish import Outcome, Release, Say, attach, stage


def to_layout(
    run: Runner, engine: docker.Engine, release: Release, path: Path, say: Say, *, compression: str = "gzip"
) -> Outcome:
    """Put the image, its tags and attachments into the OCI layout at `path`, made if need be, and the documents beside it."""
    if (
        path.exists()
        and not (path / "oci-layout").exists()
        and (not path.is_dir() or any(map(_strange, path.iterdir())))
    ):
        raise PublishError(f"{path} is there and no OCI layout", hint="name another directory, or an empty one")
    path.mkdir(parents=True, exist_ok=True)
    with scratch.held(path, waiting=lambda: say(f"waiting for another command that writes to {path}")):
        return _to_layout(run, engine, release, path, say, compression)


def _to_layout(run: Runner, engine: docker.Engine, release: Release, path: Path, say: Say, compression: str) -> Outcome:
    layout = Layout(path=path)
    layout.create()
    image = layout.named(release.name)
    whole = image is not None and _has_all(layout, image, release.digest)
    if image is None or not whole:
        say(f"compressing the layers of {release.name} ({compression})")
        image = stage(run, engine, release, layout, compression)
    image = {k: image[k] for k in ("mediaType", "digest", "size")}
    documents = release.documents(image["digest"])
    attached = attach(layout, image, release, documents)
    before = {t: layout.named(t) for t in release.tags}
    types = {d["artifactType"] for d in attached}
    ours = {d["digest"] for d in attached}

    def stays(found: Mapping[str, Any]) -> bool:
        if found.get("annotations", {}).get(oci.REF_NAME) in release.tags or found["digest"] in ours:
            return False
        if found.get("artifactType") not in types:
            return True
        if not layout.whole(found["digest"]):
            return False
        subject = json.loads(layout.blob(found["digest"]).read_bytes()).get("subject") or {}
        return bool(subject.get("digest") != image["digest"])

    others = [d for d in layout.index() if stays(d)]
    layout.write_index([*(oci.named(image, t) for t in release.tags), *others, *attached])
    _write_beside(path, documents)
    moved = {t: "unchanged" if d and d["digest"] == image["digest"] else "moved" for t, d in before.items()}
    names = {a.name: d["digest"] for a, d in zip(documents, attached, strict=True)}
    return Outcome(
        where=str(path),
        digest=image["digest"],
        pushed=not whole,
        tags=moved,
        attachments=names,
        signed=cosign.ONLY_IN_REGISTRIES,
    )


def _strange(path: Path) -> bool:
    """Is this something other than what a first publication leaves when it is killed?"""
    return path.name != "blobs" and not path.name.startswith(scratch.PREFIX)


def _has_all(layout: Layout, image: oci.Descriptor, digest: str) -> bool:
    """Does the layout hold every blob of this manifest, undamaged, and is it of the image with this digest?"""
    if not layout.whole(image["digest"]):
        return False
    manifest = json.loads(layout.blob(image["digest"]).read_bytes())
    blobs = [manifest["config"], *manifest["layers"]]
    return manifest["config"]["digest"] == digest and all(layout.whole(b["digest"]) for b in blobs)


def to_archive(
    run: Runner, engine: docker.Engine, release: Release, path: Path, say: Say, *, compression: str = "gzip"
) -> Outcome:
    """Write the archive of an OCI layout, whole or not at all; `docker load` can read it too. Documents lie beside it."""
    if path.is_dir():
        raise PublishError(f"{path} is a directory", hint="name a file, or publish a layout with oci:DIRECTORY")
    with scratch.directory(path.parent) as work:
        layout = Layout(path=work / "layout")
        outcome = to_layout(run, engine, release, layout.path, say, compression=compression)
        manifest = layout.blob(outcome.digest).read_bytes()
        references = [f"blackwell:{t}" for t in release.tags]
        (layout.path / "manifest.json").write_bytes(oci.docker_manifest(manifest, references))
        part = work / "archive.tar"
        with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as archive:
            for file in sorted(layout.path.rglob("*")):
                archive.add(file, str(file.relative_to(layout.path)), recursive=False, filter=_plain)
        same = path.exists() and _sha256(path) == _sha256(part)
        if not same:
            part.replace(path)
    _write_beside(path, release.documents(outcome.digest))
    tags = dict.fromkeys(release.tags, "unchanged" if same else "moved")
    return Outcome(
        where=str(path),
        digest=outcome.digest,
        pushed=not same,
        tags=tags,
        attachments=outcome.attachments,
        signed=outcome.signed,
    )


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without times and owners, so that the same layout gives the same archive."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_beside(path: Path, documents: Sequence[Attachment]) -> None:
    scratch.write_all(path.parent, {f"{path.name}.{document.name}": document.data for document in documents})
