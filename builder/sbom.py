"""The bill of materials of an image, CycloneDX 1.6, from its lock and from the licences that are written inside it. Pure.

The same image gives the same bytes: the serial number comes from its digest, the time from its lock.
"""

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from typing import Any

from builder.values import Image, Lock

MEDIA_TYPE = "application/vnd.cyclonedx+json"
BUILD_ONLY = ("tools", "compiler")
Texts = Mapping[str, str]


def make(image: Image, lock: Lock, digest: str, texts: Texts, version: str) -> bytes:
    """The CycloneDX document.

    digest: of the image that it describes. texts: path in the image -> content, of METADATA and copyright files.
    version: the builder's. Distributions that only the build used are listed with the scope "excluded".
    """
    python, debian = python_licences(texts), debian_licences(texts)
    components = [
        _component(
            d.name,
            d.version,
            f"pkg:pypi/{d.name}@{d.version}",
            licences=python.get(d.name, []) if d.layer not in BUILD_ONLY else [],
            scope="excluded" if d.layer in BUILD_ONLY else "required",
            properties=[("layer", d.layer), *(("lock.hash", h) for h in d.hashes)],
        )
        for d in lock.distributions
    ]
    suite = f"&distro={image.base.suite}" if image.base.suite else ""
    components += [
        _component(
            p.name,
            p.version,
            f"pkg:deb/debian/{p.name}@{p.version.replace(':', '%3A').replace('+', '%2B')}?arch={image.arch}{suite}",
            licences=debian.get(p.name, []),
            scope="required",
            properties=[("layer", "base")],
        )
        for p in lock.debian
    ]
    root = {
        "type": "container",
        "bom-ref": image.id,
        "name": image.id,
        "version": digest,
        "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
        "properties": [{"name": "blackwell:lock", "value": lock.checksum}],
    }
    refs = [c["bom-ref"] for c in components if c["scope"] == "required"]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(lock.epoch)),
            "tools": {"components": [{"type": "application", "name": "builder", "version": version}]},
            "component": root,
        },
        "components": components,
        "dependencies": [{"ref": image.id, "dependsOn": refs}],
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def _component(
    name: str,
    version: str,
    purl: str,
    *,
    licences: Sequence[Mapping[str, Any]],
    scope: str,
    properties: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "scope": scope}
    if licences:
        found["licenses"] = list(licences)
    own = [{"name": f"blackwell:{key}", "value": value} for key, value in properties]
    return {**found, "purl": purl, "properties": own}


def python_licences(texts: Texts) -> dict[str, list[dict[str, Any]]]:
    """Licences by distribution, in CycloneDX's words, as its METADATA says: an SPDX expression, else classifiers, else its text."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path, text in texts.items():
        if not path.endswith(".dist-info/METADATA"):
            continue
        fields = HeaderParser().parsestr(text)
        name = re.sub(r"[-_.]+", "-", fields.get("Name", "")).lower()
        classifiers = [c.rpartition(" :: ")[2] for c in fields.get_all("Classifier", []) if c.startswith("License ::")]
        said = (fields.get("License") or "").strip().split("\n")[0][:100]
        if expression := fields.get("License-Expression"):
            found[name] = [{"expression": expression}]
        elif names := classifiers or ([said] if said else []):
            found[name] = [{"license": {"name": n}} for n in names]
    return found


def debian_licences(texts: Texts) -> dict[str, list[dict[str, Any]]]:
    """Licences by Debian package, as a machine-readable copyright file names them; others point to the file itself."""
    found = {}
    for path, text in texts.items():
        if not (match := re.fullmatch(r"usr/share/doc/([^/]+)/copyright", path)):
            continue
        names = sorted({n.strip() for n in re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE)})
        if not text.lstrip().startswith("Format:") or not names:
            names = [f"see /{path}"]
        found[match[1]] = [{"license": {"name": n}} for n in names]
    return found


def licence_counts(document: bytes) -> list[tuple[str, int]]:
    """How many components inside the image name each licence, the commonest first; components without one count as "none"."""
    counts: Counter[str] = Counter()
    for component in json.loads(document)["components"]:
        if component["scope"] == "required":
            entries = component.get("licenses", [])
            names = {e.get("expression") or e["license"]["name"] for e in entries} or {"none given"}
            counts.update("see its copyright file" if n.startswith("see /") else n for n in names)
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
