"""What is attached to a published image: bill of materials against CycloneDX's own schema, provenance, manifests, indexes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import cyclonedx.schema
import pytest
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from builder import flow, lock, oci, plan, provenance, publish, release, sbom
from builder.errors import PublishError
from builder.values import Image, Lock, Matrix
from builder.verify import TestResult as Result
from builder.verify import Verdict

DIGEST, MANIFEST = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
SITE = "opt/venv/lib/python3.13/site-packages/"
TEXTS = {
    SITE
    + "torch-2.12.1.dist-info/METADATA": "Metadata-Version: 2.4\nName: torch\nVersion: 2.12.1\nLicense-Expression: BSD-3-Clause\n\nLicense-Expression: not a field\n",
    SITE
    + "PyYAML-6.dist-info/METADATA": "Name: PyYAML\nVersion: 6\nLicense: MIT\nClassifier: License :: OSI Approved :: MIT License\n\n",
    SITE
    + "nvidia_cublas-13.dist-info/METADATA": "Name: nvidia_cublas\nVersion: 13\nLicense: NVIDIA Proprietary Software\n of many lines\n\n",
    "usr/share/doc/bash/copyright": "Format: https://x/\n\nFiles: *\nLicense: GPL-3+\n text\n\nFiles: y\nLicense: GPL-3+\n\nLicense: BSD-4-clause\n",
    "usr/share/doc/gcc-14-base/copyright": "This is the Debian prepackaged version of GCC.\nLicense: somewhere in prose\n",
}


@pytest.fixture(scope="module")
def image(matrix: Matrix) -> Image:
    return plan.resolve(matrix, plan.Request(triton="3.7"))


@pytest.fixture(scope="module")
def locked(image: Image) -> Lock:
    path = flow.Project.find().lock_path(image)
    return lock.loads(path.read_text(), where=path.name)


@pytest.fixture(scope="module")
def bill(image: Image, locked: Lock) -> dict[str, Any]:
    return dict(json.loads(sbom.make(image, locked, DIGEST, TEXTS, "1")))


def test_the_bill_of_materials_is_valid_cyclonedx(bill: dict[str, Any]) -> None:
    folder = Path(str(cyclonedx.schema.__file__)).parent / "_res"
    schemas = {
        n: json.loads((folder / f"{n}.SNAPSHOT.schema.json").read_text()) for n in ("bom-1.6", "spdx", "jsf-0.82")
    }
    registry: Registry[Any] = Registry().with_resources(
        (value["$id"], Resource.from_contents(value)) for value in schemas.values()
    )
    validator = Draft7Validator(schemas["bom-1.6"], registry=registry, format_checker=Draft7Validator.FORMAT_CHECKER)
    assert [e.message for e in validator.iter_errors(bill)] == []
    wrong = {**bill, "components": [{**bill["components"][0], "scope": "sometimes"}]}
    assert list(validator.iter_errors(wrong)), "the schema must be able to say no"


def test_the_bill_lists_the_whole_lock_and_the_same_image_gives_the_same_bytes(
    bill: dict[str, Any], image: Image, locked: Lock
) -> None:
    pins = {(d.name, d.version) for d in locked.distributions} | {(p.name, p.version) for p in locked.debian}
    assert {(c["name"], c["version"]) for c in bill["components"]} == pins
    assert len({c["bom-ref"] for c in bill["components"]}) == len(bill["components"])
    scopes = {c["name"]: c["scope"] for c in bill["components"]}
    assert scopes["torch"] == "required" and scopes["nvidia-cuda-nvcc"] == "excluded" and scopes["uv"] == "excluded"
    assert sbom.make(image, locked, DIGEST, TEXTS, "1") == sbom.make(
        image, locked, DIGEST, dict(reversed(TEXTS.items())), "1"
    )


@pytest.mark.parametrize(
    ("name", "licences"),
    [
        ("torch", [{"expression": "BSD-3-Clause"}]),
        ("pyyaml", [{"license": {"name": "MIT License"}}]),
        ("nvidia-cublas", [{"license": {"name": "NVIDIA Proprietary Software"}}]),
        ("bash", [{"license": {"name": "BSD-4-clause"}}, {"license": {"name": "GPL-3+"}}]),
        ("gcc-14-base", [{"license": {"name": "see /usr/share/doc/gcc-14-base/copyright"}}]),
        ("zlib1g", None),
    ],
)
def test_licences_are_what_the_image_says(bill: dict[str, Any], name: str, licences: Any) -> None:
    assert {c["name"]: c.get("licenses") for c in bill["components"]}[name] == licences


def test_licences_are_counted_for_what_is_inside(bill: dict[str, Any]) -> None:
    counts = dict(sbom.licence_counts(json.dumps(bill).encode()))
    inside = [c for c in bill["components"] if c["scope"] == "required"]
    assert counts["GPL-3+"] == counts["BSD-3-Clause"] == counts["see its copyright file"] == 1
    assert counts["none given"] == len(inside) - 5


def statement(image: Image, locked: Lock, environment: dict[str, str], template: str = "sha256:77") -> dict[str, Any]:
    made = provenance.make(
        image, locked, manifest=MANIFEST, digest=DIGEST, inputs="sha256:99", template=template, engine="20.10", version="1", environment=environment,
    )  # fmt: skip
    return dict(json.loads(made))


def test_provenance_names_subjects_inputs_base_and_builder(image: Image, locked: Lock) -> None:
    said = statement(image, locked, {})
    assert (
        said["_type"] == "https://in-toto.io/Statement/v1" and said["predicateType"] == "https://slsa.dev/provenance/v1"
    )
    assert [s["digest"]["sha256"] for s in said["subject"]] == ["cd" * 32, "ab" * 32]
    definition, details = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    dependencies = {d["name"]: d for d in definition["resolvedDependencies"]}
    assert (
        dependencies["inputs"]["digest"]["sha256"] == "99" and dependencies["Dockerfile.j2"]["digest"]["sha256"] == "77"
    )
    assert f"sha256:{dependencies[f'lock/{locked.name}']['digest']['sha256']}" == locked.checksum
    assert len(dependencies["base"]["annotations"]["packages"]) == len(locked.debian)
    assert definition["externalParameters"]["id"] == image.id
    assert details["builder"] == {"id": "urn:blackwell-builder:local", "version": {"builder": "1", "docker": "20.10"}}
    assert "metadata" not in details, "times of the build are not recorded, so none may be claimed"


GITHUB = {
    "GITHUB_SERVER_URL": "https://g",
    "GITHUB_REPOSITORY": "t/r",
    "GITHUB_SHA": "c0ffee",
    "GITHUB_WORKFLOW_REF": "t/r/.github/w.yml@m",
}


def test_a_ci_job_names_its_commit_only_for_the_inputs_that_it_has(image: Image, locked: Lock) -> None:
    def sources(said: dict[str, Any]) -> list[Any]:
        return [d for d in said["predicate"]["buildDefinition"]["resolvedDependencies"] if d.get("name") == "source"]

    said = statement(image, locked, GITHUB)
    assert sources(said) == [{"name": "source", "uri": "git+https://g/t/r", "digest": {"gitCommit": "c0ffee"}}]
    assert said["predicate"]["runDetails"]["builder"]["id"] == "https://g/t/r/.github/w.yml@m"
    assert sources(statement(image, locked, GITHUB, template="")) == []


def test_a_base_by_digest_stands_in_the_provenance(image: Image, locked: Lock) -> None:
    other = replace(image, base=replace(image.base, reference="r.example.com/base@sha256:" + "ee" * 32))
    base = statement(other, locked, {})["predicate"]["buildDefinition"]["resolvedDependencies"][2]
    assert base["uri"] == "docker://r.example.com/base" and base["digest"] == {"sha256": "ee" * 32}


def artifact(kind: str, data: bytes = b"x") -> dict[str, Any]:
    subject = {"mediaType": oci.MANIFEST, "digest": MANIFEST, "size": 3}
    return oci.referrer(
        oci.artifact_manifest(subject, oci.Attachment(name="n", media_type=kind, data=data), "2026-12-01T00:00:00Z")
    )


def test_an_index_of_referrers_changes_only_what_changed() -> None:
    foreign, old, other = artifact("scan"), artifact("a"), artifact("b")
    first = oci.referrers_index(None, [old, other])
    assert oci.referrers_index(first, [old, other]) == first
    assert oci.referrers_index(first, [other]) == first
    mixed = oci.dumps({**json.loads(first), "manifests": [old, foreign, other, old]})
    fresh = artifact("a", b"new")
    assert json.loads(oci.referrers_index(mixed, [fresh]))["manifests"] == [fresh, foreign, other]
    assert oci.referrers_tag(MANIFEST) == "sha256-" + "cd" * 32


def test_a_layout_names_nothing_that_is_not_there(tmp_path: Path) -> None:
    layout = oci.Layout(path=tmp_path / "l")
    layout.create()
    layout.put(b"blob")
    found = oci.named(oci.descriptor(b"blob", "text/plain"), "v1")
    layout.write_index([found])
    layout.create()
    assert layout.named("v1") == found and layout.named("v2") is None
    assert layout.blob(found["digest"]).read_bytes() == b"blob"
    other = oci.Layout(path=tmp_path / "m")
    other.create()
    other.adopt(layout, found["digest"])
    assert other.blob(found["digest"]).read_bytes() == b"blob"
    assert not list(tmp_path.rglob("*.part"))


def verdict(**more: Any) -> Verdict:
    tests = (Result(name="t", outcome="passed", seconds=1.0),)
    return Verdict(**{"id": "i", "digest": DIGEST, "lock": "sha256:1", "tests": tests, **more})


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "never verified"),
        (verdict(digest="sha256:other"), "the verdict is on sha256:other"),
        (verdict(lock="sha256:2"), "another lock"),
        (verdict(tests=()), "none of its tests ran"),
        (verdict(tests=(Result(name="bad one", outcome="failed", seconds=1.0),)), "bad one"),
    ],
)
def test_only_a_digest_that_passed_may_be_published(found: Verdict | None, sentence: str) -> None:
    with pytest.raises(PublishError, match=sentence) as refused:
        publish.check(found, "i", DIGEST, "sha256:1")
    assert "verify" in refused.value.hint
    publish.check(verdict(), "i", DIGEST, "sha256:1")


@pytest.mark.parametrize(
    ("request_", "tags"),
    [
        ({"triton": "3.7"}, ("triton3.7-cu130", "triton3.7")),
        ({"triton": "3.6"}, ("triton3.6-cu130", "triton3.6")),
        ({"cuda": "12.8"}, ("triton3.6-cu128",)),
        ({"triton": "3.7", "capabilities": ("12.0",)}, ("triton3.7-cu130-sm120", "triton3.7-sm120")),
        ({"triton": "3.7", "platform": "linux/arm64"}, ("triton3.7-cu130-arm64", "triton3.7-arm64")),
        ({"triton": "3.7", "torch": "2.11"}, ()),
        ({"triton": "3.7", "fla": "0.5.2"}, ()),
    ],
)
def test_short_tags_move_only_to_what_they_mean(
    matrix: Matrix, request_: dict[str, Any], tags: tuple[str, ...]
) -> None:
    assert release.short_tags(matrix, plan.resolve(matrix, plan.Request(**request_))) == tags
