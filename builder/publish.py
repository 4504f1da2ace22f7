"""Publish a verified image: push its digest with what is attested of it, then move tags.

Order is the safety: blobs, the image's manifest by digest, attachments, signature, and tags last of all. Whatever interrupts a
push leaves blobs and untagged manifests that the next push finds there already, and no tag on anything that is not whole.
"""

import contextlib
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder import oci
from builder.engine import cosign, docker, host, scratch, skopeo
from builder.engine.process import Runner
from builder.engine.registry import Repository
from builder.errors import PublishError
from builder.oci import Attachment, Layout
from builder.verify import Verdict

Say = Callable[[str], None]
COMPRESSIONS = ("gzip", "zstd")


@dataclass(frozen=True, kw_only=True)
class Release:
    """What is to be published: a local image by digest, its name and tags (the name first), annotations and documents.

    `documents` answers with what is to be attached to the manifest of a digest. `created` (RFC 3339) stands in manifests, so it must be the same for the same image.
    """

    name: str
    digest: str
    layers: tuple[str, ...]
    tags: tuple[str, ...]
    created: str
    annotations: Mapping[str, str]
    documents: Callable[[str], tuple[Attachment, ...]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What publishing did: the manifest's digest, tags with "moved" or "unchanged", attachments by name with their digest."""

    where: str
    digest: str
    pushed: bool
    tags: Mapping[str, str]
    attachments: Mapping[str, str]
    signed: str


def check(verdict: Verdict | None, name: str, digest: str, lock: str) -> None:
    """Raise PublishError unless the verdict is on just this digest and lock, and says passed."""
    hint = f"run `builder verify --id {name}`"
    if verdict is None:
        raise PublishError(f"{name} ({digest}) was never verified: only a digest that passed is published", hint=hint)
    if verdict.digest != digest:
        raise PublishError(f"the verdict is on {verdict.digest}, the image is {digest}", hint=hint)
    if verdict.lock != lock:
        raise PublishError(
            f"{name} was built from another lock than the repository holds now",
            hint=f"build it anew with `builder build --id {name}`, then verify it",
        )
    if not verdict.passed:
        failed = [t.name for t in verdict.tests if t.outcome == "failed"]
        raise PublishError(
            f"{name} ({digest}) did not pass: {len(failed)} tests failed ({', '.join(failed[:5])})"
            if failed
            else f"{name} ({digest}) did not pass: none of its tests ran",
            hint=f"mend it, then {hint}",
        )


def stage(run: Runner, engine: docker.Engine, release: Release, layout: Layout, compression: str) -> dict[str, Any]:
    """Put a local image into a layout, compressed, under its configuration's own digest; returns its descriptor.

    skopeo rewrites a Docker configuration when it makes an OCI one, which changes the image's digest; so the layers are
    taken from its result, and the configuration from Docker as it is. Raises PublishError if layers got lost or changed.
    """
    with scratch.directory(layout.path.parent) as work:
        archive, made = work / "image.tar", Layout(path=work / "layout")
        run([engine.client, "save", "-o", archive, release.digest])
        options = ("--dest-compress-format", compression) if compression != "gzip" else ()
        skopeo.copy(run, f"docker-archive:{archive}", f"oci:{made.path}:staged", skopeo.Access(), *options)
        config = _configuration(archive)
        layers = json.loads(made.blob(made.index()[0]["digest"]).read_text(encoding="utf-8"))["layers"]
        if tuple(json.loads(config)["rootfs"]["diff_ids"]) != release.layers or len(layers) != len(release.layers):
            raise PublishError(
                f"{release.name}: Docker saved other layers than it has; the image changed meanwhile",
                hint="verify the image that is there now, then publish it",
            )
        for layer in layers:
            layout.adopt(made, layer["digest"])
        layout.put(config)
        manifest = oci.image_manifest(config, layers, release.annotations)
        layout.put(manifest)
    return oci.descriptor(manifest, oci.MANIFEST)


def _configuration(archive: Path) -> bytes:
    with tarfile.open(archive) as tar:
        listing = tar.extractfile("manifest.json")
        assert listing is not None
        member = tar.extractfile(json.load(listing)[0]["Config"])
        assert member is not None
        return member.read()


def to_registry(
    run: Runner,
    engine: docker.Engine,
    release: Release,
    name: str,
    access: skopeo.Access,
    say: Say,
    *,
    compression: str = "gzip",
    key: str = "",
) -> Outcome:
    """Push to HOST/REPO: what is there already stays as it is. `key` is cosign's, "" for none. Raises PublishError."""
    repository = Repository(name=name, access=access, run=run)
    target = f"docker://{name}"
    present = repository.manifest(release.name)
    with _workspace() as work:
        layout = Layout(path=work / "layout")
        layout.create()
        if present is not None and json.loads(present).get("config", {}).get("digest") == release.digest:
            image = oci.descriptor(present, json.loads(present).get("mediaType", oci.MANIFEST))
        else:
            say(f"compressing the layers of {release.name} ({compression})")
            image, present = stage(run, engine, release, layout, compression), None
            say(f"pushing {image['digest']} to {name}")
            layout.write_index([oci.named(image, "image")])
            skopeo.copy(run, f"oci:{layout.path}:image", f"{target}@{image['digest']}", access, "--preserve-digests")
        attached, signed = _push_attachments(run, repository, layout, image, release, say)
    signature = "signed already"
    if not signed:
        signature = cosign.sign(run, f"{name}@{image['digest']}", access, key, say)
    manifest = repository.manifest(image["digest"])
    if manifest is None or oci.digest(manifest) != image["digest"]:
        raise PublishError(
            f"{name}: the registry does not have {image['digest']} after the push; no tag was moved",
            hint="run the same command again; if it stays so, look at the registry's own log",
        )
    moved = {}
    for tag in release.tags:
        there = repository.manifest(tag)
        moved[tag] = "unchanged" if there is not None and oci.digest(there) == image["digest"] else "moved"
        if moved[tag] == "moved":
            repository.put(tag, manifest, image["mediaType"])
    return Outcome(
        where=name, digest=image["digest"], pushed=present is None, tags=moved, attachments=attached, signed=signature
    )


def attach(
    layout: Layout, image: oci.Descriptor, release: Release, documents: Sequence[Attachment]
) -> list[dict[str, Any]]:
    """Write attachments and their manifests into a layout; returns how an index of referrers names them."""
    layout.put(b"{}")
    made = []
    for document in documents:
        manifest = oci.artifact_manifest(image, document, release.created)
        layout.put(document.data)
        layout.put(manifest)
        made.append(oci.referrer(manifest))
    return made


def _push_attachments(
    run: Runner, repository: Repository, layout: Layout, image: oci.Descriptor, release: Release, say: Say
) -> tuple[dict[str, str], bool]:
    """Push what is new of the documents, and make them findable: by the referrers API, or by its tag where there is none.

    Returns the attached documents, name -> digest, and whether the image is signed already.
    """
    tag = oci.referrers_tag(image["digest"])
    api = repository.referrers(image["digest"])
    listed = api if api is not None else repository.manifest(tag)
    there = {d.get("artifactType"): d for d in json.loads(listed or b"{}").get("manifests", [])}
    documents = release.documents(image["digest"])
    fresh = [d for d in documents if not (d.once and d.media_type in there)]
    attached = attach(layout, image, release, fresh)
    for found in attached:
        if repository.manifest(found["digest"]) is None:
            layout.write_index([oci.named(found, "attachment")])
            target = f"docker://{repository.name}@{found['digest']}"
            skopeo.copy(run, f"oci:{layout.path}:attachment", target, repository.access, "--preserve-digests")
    index = oci.referrers_index(listed, attached)
    if api is None and index != listed:
        say(f"attaching {len(attached)} documents under the tag {tag}: this registry has no referrers API")
        repository.put(tag, index, oci.INDEX)
    final = {**there, **{d["artifactType"]: d for d in attached}}
    names = {d.name: str(final[d.media_type]["digest"]) for d in documents}
    signed = any("sigstore" in str(t) for t in there) or repository.manifest(f"{tag}.sig") is not None
    return names, signed


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    """A directory for the compressed layers of one push, gone afterwards."""
    with scratch.directory(host.store() / "publish") as work:
        yield work
