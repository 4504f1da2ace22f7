"""OCI manifests, attachments (referrers) and layouts, as data and as files. Nothing here knows what an image is for.

https://github.com/opencontainers/image-spec/blob/v1.1.0/manifest.md, and "Referrers Tag Schema" in
https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.errors import DamagedError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
Descriptor = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A document about an image: the file that it would be, its media type, which is its artifact type too, and its bytes.

    `once`: an earlier one in a registry is not replaced.
    """

    name: str
    media_type: str
    data: bytes
    once: bool = False


def digest(data: bytes) -> str:
    """sha256 of some bytes, as OCI writes it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def dumps(value: Any) -> bytes:
    """JSON without white space; the same value gives the same bytes."""
    return json.dumps(value, separators=(",", ":")).encode()


def descriptor(data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
    """What names a blob."""
    return {"mediaType": media_type, "digest": digest(data), "size": len(data), **more}


def image_manifest(config: bytes, layers: Sequence[Descriptor], annotations: Mapping[str, str]) -> bytes:
    """A manifest that names the image's configuration as it is, so that a pulled image has the digest that was verified."""
    value = {"schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor(config, CONFIG), "layers": list(layers)}
    return dumps({**value, "annotations": dict(annotations)})


def artifact_manifest(subject: Descriptor, attachment: Attachment, created: str) -> bytes:
    """The manifest of an attachment to the manifest `subject`. `created`: RFC 3339, part of the digest."""
    layer = descriptor(
        attachment.data, attachment.media_type, annotations={"org.opencontainers.image.title": attachment.name}
    )
    return dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "artifactType": attachment.media_type,
            "config": descriptor(b"{}", EMPTY),
            "layers": [layer],
            "subject": {key: subject[key] for key in ("mediaType", "digest", "size")},
            "annotations": {"org.opencontainers.image.created": created},
        }
    )


def referrer(manifest: bytes) -> dict[str, Any]:
    """How an index of referrers names an attachment's manifest."""
    value = json.loads(manifest)
    return descriptor(manifest, MANIFEST, artifactType=value["artifactType"], annotations=value["annotations"])


def referrers_tag(subject: str) -> str:
    """The tag under which registries without the referrers API keep an image's referrers."""
    return subject.replace(":", "-", 1)


def referrers_index(present: bytes | None, ours: Sequence[Descriptor]) -> bytes:
    """The index of referrers with ours in it: ours take the place of earlier ones of the same type, all others stay.

    present: the index that is there already, or None.
    """
    fresh = {d["artifactType"]: d for d in ours}
    merged = []
    for found in json.loads(present)["manifests"] if present else []:
        if found.get("artifactType") not in {d["artifactType"] for d in ours}:
            merged.append(found)
        elif found["artifactType"] in fresh:
            merged.append(fresh.pop(found["artifactType"]))
    return dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [*merged, *fresh.values()]})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An OCI image layout on disk. Blobs come first, index.json last: whatever the index names is whole."""

    path: Path

    def create(self) -> None:
        """Make an empty layout, unless there is one."""
        blobs = self.path / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        # Of a push that was killed; the caller sees to it that no other one is running.
        for half in blobs.glob("*.part"):
            half.unlink()
        (self.path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="utf-8")
        if not (self.path / "index.json").exists():
            self.write_index([])

    def blob(self, name: str) -> Path:
        """Where the blob of a digest lies."""
        return self.path / "blobs" / Path(*name.split(":", 1))

    def whole(self, name: str) -> bool:
        """Is the blob of a digest there, with just that content?"""
        try:
            with self.blob(name).open("rb") as file:
                return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest() == name
        except FileNotFoundError:
            return False

    def put(self, data: bytes) -> None:
        """Write a blob, also in place of a damaged one."""
        path = self.blob(digest(data))
        if not self.whole(digest(data)):
            path.with_suffix(".part").write_bytes(data)
            path.with_suffix(".part").rename(path)

    def adopt(self, other: "Layout", name: str) -> None:
        """Take a blob over from another layout, linked where the file system can; a damaged one is replaced."""
        path, source = self.blob(name), other.blob(name)
        if self.whole(name):
            return
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            part.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, part)
        part.rename(path)

    def index(self) -> list[dict[str, Any]]:
        """The descriptors in index.json. Raises DamagedError if it is no index."""
        path = self.path / "index.json"
        try:
            found = json.loads(path.read_bytes())["manifests"]
            if all(isinstance(d["digest"], str) for d in found):
                return list(found)
        except (ValueError, KeyError, TypeError):
            pass
        raise DamagedError(
            f"{path} is no index of images", hint="move the layout away and publish anew, or name another directory"
        )

    def write_index(self, descriptors: Sequence[Descriptor]) -> None:
        """Replace index.json, whole or not at all."""
        part = self.path / "index.json.part"
        part.write_bytes(dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": list(descriptors)}))
        part.rename(self.path / "index.json")

    def named(self, name: str) -> dict[str, Any] | None:
        """The descriptor with a name (tag), or None."""
        return next((d for d in self.index() if d.get("annotations", {}).get(REF_NAME) == name), None)


def named(value: Descriptor, name: str) -> dict[str, Any]:
    """A descriptor with a name (tag) for a layout's index."""
    return {**value, "annotations": {**value.get("annotations", {}), REF_NAME: name}}


def docker_manifest(manifest: bytes, references: Sequence[str]) -> bytes:
    """The manifest.json that makes an archive of a layout loadable by `docker load` of any age."""
    value = json.loads(manifest)
    paths = ["blobs/" + d["digest"].replace(":", "/") for d in (value["config"], *value["layers"])]
    return dumps([{"Config": paths[0], "RepoTags": list(references), "Layers": paths[1:]}])
