"""Provenance of an image: an in-toto statement with the SLSA v1 predicate. Pure, and the same for the same image.

https://slsa.dev/spec/v1.0/provenance. Only what is known is said: the times of the build are not recorded, so they are not here.
"""

import json
from collections.abc import Mapping
from typing import Any

from builder.values import Image, Lock

MEDIA_TYPE = "application/vnd.in-toto+json"
BUILD_TYPE = "urn:blackwell-builder:image:v1"


def make(
    image: Image,
    lock: Lock,
    *,
    manifest: str,
    digest: str,
    inputs: str,
    template: str,
    engine: str,
    version: str,
    environment: Mapping[str, str],
) -> bytes:
    """The statement.

    manifest: digest of the image's manifest. digest: of its configuration, which is what was verified. inputs: checksum of
    all inputs as the image's label has it. template: checksum of Dockerfile.j2, or "" if the image was built from other inputs
    than there are now; then no source is named either. engine: the Docker Engine's version. version: the builder's.
    environment: variables of a CI system, which name the source.
    """
    dependencies: list[dict[str, Any]] = [
        _resource(f"lock/{lock.name}", lock.checksum),
        _resource("inputs", inputs),
        _base(image, lock),
    ]
    if template:
        dependencies.append(_resource("Dockerfile.j2", template))
        dependencies += _source(environment)
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_resource(image.id, manifest), _resource(f"{image.id} (configuration)", digest)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "id": image.id,
                    "platform": image.platform,
                    "versions": image.versions,
                    "capabilities": [str(c) for c in image.capabilities],
                },
                "internalParameters": {"sourceDateEpoch": lock.epoch},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": _builder_id(environment), "version": {"builder": version, "docker": engine}},
            },
        },
    }
    return (json.dumps(statement, indent=1) + "\n").encode()


def _resource(name: str, checksum: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": checksum.removeprefix("sha256:")}}


def _base(image: Image, lock: Lock) -> dict[str, Any]:
    """The base: somebody's image by its digest, or Debian by the packages that the lock pins."""
    if image.base.reference:
        name, _, found = image.base.reference.partition("@")
        return {"uri": f"docker://{name}", **_resource("base", found)}
    packages = [f"{p.name}={p.version}" for p in lock.debian]
    return {"name": "base", "uri": f"pkg:generic/debian@{image.base.suite}", "annotations": {"packages": packages}}


def _source(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The commit that a CI job built, if it names one."""
    commit = environment.get("GITHUB_SHA") or environment.get("CI_COMMIT_SHA")
    server = environment.get("GITHUB_SERVER_URL", "")
    url = f"{server}/{environment['GITHUB_REPOSITORY']}" if server else environment.get("CI_PROJECT_URL", "")
    return [{"name": "source", "uri": f"git+{url}", "digest": {"gitCommit": commit}}] if commit and url else []


def _builder_id(environment: Mapping[str, str]) -> str:
    """Who built it: BUILDER_ID, else the CI workflow, else a machine that makes no claim."""
    server, workflow = environment.get("GITHUB_SERVER_URL"), environment.get("GITHUB_WORKFLOW_REF")
    return environment.get("BUILDER_ID") or (
        f"{server}/{workflow}" if server and workflow else "urn:blackwell-builder:local"
    )
