"""A `docker buildx bake` file for images, so that other machines can build them: remote and Kubernetes BuildKit builders. Pure.

https://docs.docker.com/build/bake/reference. Three groups, to be baked in this order, each served from the cache of the one
before: `fingerprint` and `report` hand small files back (the kernel cache's name, and what the labels say), `image` pushes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder import arch
from builder.values import Image

GROUPS = ("fingerprint", "report", "image")
# BuildKit gives files the time of the lock, so that two builds of a lock have one digest; from 0.13 on, older ones ignore it.
# A Docker Engine as builder refuses it, since it unpacks what it makes ("conflicts with unpack"); BuildKit builders don't.
OUTPUT = "type=image,push=true,oci-mediatypes=true,compression={compression},rewrite-timestamp=true"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One image to bake: its build context, where its answers go, and what is known of them so far.

    `epoch`: seconds, UTC. `fingerprint` and `labels` are empty until those groups were baked.
    """

    image: Image
    context: Path
    answers: Path
    epoch: int
    secrets: Mapping[str, Path]
    fingerprint: str = ""
    labels: Mapping[str, str] | None = None


def name(image: Image) -> str:
    """The image's target: its identifier in the letters that bake allows."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", image.id)


def bake(jobs: Sequence[Job], *, to: str, cache: str = "", compression: str = "zstd") -> dict[str, Any]:
    """The bake file as data. A group whose earlier answers are not known yet is left out.

    to: HOST/REPO to push to. cache: HOST/REPO for the registry cache, in and out, "" for none.
    """
    targets: dict[str, Any] = {}
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    for job in jobs:
        common = _common(job, cache)
        key = name(job.image)
        local = {"output": [f"type=local,dest={job.answers}"]}
        targets[f"{key}-fingerprint"] = {**common, **local, "target": "fingerprint"}
        groups["fingerprint"].append(f"{key}-fingerprint")
        if not job.fingerprint:
            continue
        common["args"] = {**common["args"], "FINGERPRINT": job.fingerprint}
        targets[f"{key}-report"] = {**common, **local, "target": "report"}
        groups["report"].append(f"{key}-report")
        if job.labels is None:
            continue
        targets[key] = {
            **common,
            "target": "final",
            "tags": [f"{to}:{job.image.id}"],
            "labels": dict(job.labels),
            "output": [OUTPUT.format(compression=compression)],
        }
        if cache:
            targets[key]["cache-to"] = [f"type=registry,ref={cache}:{job.image.id},mode=max,compression={compression}"]
        groups["image"].append(key)
    return {
        "variable": {"JOBS": {"default": "2"}},
        "group": {group: {"targets": members} for group, members in groups.items() if members},
        "target": targets,
    }


def _common(job: Job, cache: str) -> dict[str, Any]:
    return {
        "context": str(job.context),
        "dockerfile": "Dockerfile",
        "platforms": [job.image.platform],
        "args": {
            "GENCODE": arch.gencode(job.image.capabilities),
            "JOBS": "${JOBS}",
            "EXTENSIONS": "compile",
            "SOURCE_DATE_EPOCH": str(job.epoch),
        },
        "secret": [f"id={key},src={path}" for key, path in job.secrets.items()],
        "cache-from": [f"type=registry,ref={cache}:{job.image.id}"] if cache else [],
        # We attach our own: BuildKit's SBOM step breaks on images this large (https://github.com/harvester/os2/issues/274).
        "attest": ["type=provenance,disabled=true"],
    }
