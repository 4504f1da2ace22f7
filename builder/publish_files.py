"""Publish a verified image into files: an OCI layout, or its archive; the documents about it lie beside."""

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder import oci
from builder.engine import cosign, docker
from builder.engine.process import Runner
from builder.errors import PublishError
from builder.oci import Attachment, Layout
from builder.publish import Outcome, Release, Say, attach, stage


def to_layout(
    run: Runner, engine: docker.Engine, release: Release, path: Path, say: Say, *, compression: str = "gzip"
) -> Outcome:
    """Put the image, its tags and attachments into the OCI layout at `path`, made if need be, and the documents beside it."""
    if path.exists() and not (path / "oci-layout").exists() and (path.is_file() or any(path.iterdir())):
        raise PublishError(f"{path} is there and no OCI layout", hint="name another directory, or an empty one")
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
        subject = json.loads(layout.blob(found["digest"]).read_text()).get("subject", {})
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


def _has_all(layout: Layout, image: oci.Descriptor, digest: str) -> bool:
    """Does the layout hold every blob of this manifest, and is it of the image with this digest?"""
    path = layout.blob(image["digest"])
    if not path.exists():
        return False
    manifest = json.loads(path.read_text())
    blobs = [manifest["config"], *manifest["layers"]]
    sound = all(
        layout.blob(b["digest"]).exists() and layout.blob(b["digest"]).stat().st_size == b["size"] for b in blobs
    )
    return sound and manifest["config"]["digest"] == digest


def to_archive(
    run: Runner, engine: docker.Engine, release: Release, path: Path, say: Say, *, compression: str = "gzip"
) -> Outcome:
    """Write the archive of an OCI layout, whole or not at all; `docker load` can read it too. Documents lie beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".publishing-") as work:
        layout = Layout(path=Path(work) / "layout")
        outcome = to_layout(run, engine, release, layout.path, say, compression=compression)
        manifest = layout.blob(outcome.digest).read_bytes()
        references = [f"blackwell:{t}" for t in release.tags]
        (layout.path / "manifest.json").write_bytes(oci.docker_manifest(manifest, references))
        part = Path(work) / "archive.tar"
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
    for document in documents:
        path.with_name(f"{path.name}.{document.name}").write_bytes(document.data)
