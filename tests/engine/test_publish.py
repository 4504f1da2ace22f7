"""Publishing to a real registry, an OCI layout and an archive: order, repetition, interruption, refusals, what is attached."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder import flow, oci, plan, publish, release
from builder.engine import contents, docker, host
from builder.engine.process import run
from builder.engine.registry import Repository
from builder.engine.skopeo import Access
from builder.errors import PublishError
from builder.values import Image, Lock
from tests.engine import registries, trixie
from tests.engine.registries import Registry

ROOT = Path(__file__).resolve().parents[2]


class Tiny:
    """A tiny image with the identity of one that nobody builds, verified, in a store of its own."""

    def __init__(self, folder: Path, outcome: str = "passed") -> None:
        self.project = flow.Project.find()
        self.engine = docker.ensure(run, print)
        self.image: Image = flow.choose(self.project, plan.Request(triton="3.7", capabilities=("10.3", "12.1")))
        self.lock: Lock = flow.read_lock(self.project, self.image)
        self.digest = registries.tiny_image(self.engine, self.image, self.lock, folder)
        self.verdict = registries.verdict(self.image, self.digest, self.lock, outcome)

    def publish(self, to: str, access: Access | None = None, **more: Any) -> publish.Outcome:
        wish = release.Wish(to=to, access=access or Access(), **more)
        return release.publish_image(run, self.project, self.image, wish, print)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiny]:
    monkeypatch.setenv("BUILDER_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    made = Tiny(tmp_path / "image")
    yield made
    for reference in (made.image.tag, made.digest):
        if docker.inspect(made.engine, reference):
            made.engine.api.images.remove(reference, force=True)


@pytest.fixture
def registry(tmp_path: Path, tiny: Tiny) -> Iterator[Registry]:
    (tmp_path / "registry").mkdir()
    with registries.serving(tmp_path / "registry") as found:
        yield found


def all_tags_are_whole(found: Registry) -> list[str]:
    """Every tag names a manifest whose parts are all there; returns the tags."""
    repository = Repository(name=found.repository, access=found.access, run=run)
    tags = repository.tags()
    for tag in tags:
        manifest = json.loads(repository.manifest(tag) or b"")
        for part in [manifest["config"], *manifest["layers"]] if "layers" in manifest else []:
            assert len(registries.fetch(found, f"/blobs/{part['digest']}")) == part["size"], (tag, part)
        for part in manifest.get("manifests", []):
            assert repository.manifest(part["digest"]) is not None, (tag, part)
    return tags


@pytest.mark.parametrize(("tls", "auth"), [(False, False), (True, False), (True, True)])
def test_a_verified_digest_arrives_whole_with_its_tags(tiny: Tiny, tmp_path: Path, tls: bool, auth: bool) -> None:
    (tmp_path / "registry").mkdir()
    with registries.serving(tmp_path / "registry", tls=tls, auth=auth) as found:
        outcome = tiny.publish(found.repository, found.access)
        repository = Repository(name=found.repository, access=found.access, run=run)
        manifest = repository.manifest(outcome.digest)
        assert manifest is not None and json.loads(manifest)["config"]["digest"] == tiny.digest
        short = ["triton3.7-cu130-sm103-sm121", "triton3.7-sm103-sm121"]
        assert list(outcome.tags) == [tiny.image.id, *short]
        assert repository.tags() == sorted([*outcome.tags, oci.referrers_tag(outcome.digest)])
        assert all(repository.manifest(tag) == manifest for tag in outcome.tags)


def test_what_is_pulled_back_is_what_was_verified(tiny: Tiny, registry: Registry) -> None:
    before = contents.local(tiny.engine, tiny.digest)
    tiny.publish(registry.repository)
    tiny.engine.api.images.remove(tiny.image.tag, force=True)
    assert docker.inspect(tiny.engine, tiny.digest) is None
    reference = f"{registry.repository}:{tiny.image.id}"
    run([tiny.engine.client, "pull", reference])
    try:
        found = docker.inspect(tiny.engine, reference)
        assert found is not None and found["Id"] == tiny.digest
        assert release.read_verdict(found["Id"]) is not None
        pulled = contents.local(tiny.engine, tiny.digest)
        assert pulled.entries == before.entries and pulled.labels == before.labels
    finally:
        tiny.engine.api.images.remove(reference, force=True)


def test_zstd_layers_keep_the_digest_too(tiny: Tiny, registry: Registry) -> None:
    outcome = tiny.publish(registry.repository, compression="zstd")
    manifest = json.loads(registries.fetch(registry, f"/manifests/{outcome.digest}"))
    assert manifest["config"]["digest"] == tiny.digest
    assert {layer["mediaType"] for layer in manifest["layers"]} == {"application/vnd.oci.image.layer.v1.tar+zstd"}
    found = contents.elsewhere(run, f"docker://{registry.repository}@{outcome.digest}", registry.access)
    assert found.entries == contents.local(tiny.engine, tiny.digest).entries


def test_pushing_twice_changes_nothing(tiny: Tiny, registry: Registry) -> None:
    first = tiny.publish(registry.repository)
    before = registry.files()
    second = tiny.publish(registry.repository)
    assert registry.files() == before
    assert first.pushed and not second.pushed
    assert set(second.tags.values()) == {"unchanged"} and second.attachments == first.attachments


def test_a_further_tag_moves_only_when_asked(tiny: Tiny, registry: Registry) -> None:
    assert "latest" not in tiny.publish(registry.repository).tags
    assert "latest" not in all_tags_are_whole(registry)
    assert tiny.publish(registry.repository, tags=("latest",)).tags["latest"] == "moved"
    assert "latest" in all_tags_are_whole(registry)


@pytest.mark.parametrize("spoil", ["never verified", "failed", "skipped", "another digest", "another lock"])
def test_without_a_passing_verdict_nothing_is_pushed(tiny: Tiny, registry: Registry, spoil: str) -> None:
    said = json.loads(tiny.verdict.read_text())
    if spoil == "never verified":
        tiny.verdict.unlink()
    elif spoil in ("failed", "skipped"):
        registries.verdict(tiny.image, tiny.digest, tiny.lock, spoil)
    else:
        key = "digest" if spoil == "another digest" else "lock"
        tiny.verdict.write_text(json.dumps({**said, key: "sha256:" + "1" * 64}))
    with pytest.raises(PublishError) as refused:
        tiny.publish(registry.repository)
    assert f"builder verify --id {tiny.image.id}" in refused.value.hint or "builder build" in refused.value.hint
    assert registry.files() == {}


def steps_of(tiny: Tiny, registry: Registry, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> int:
    """Publish, and interrupt before the step number `stop_at`: a copy by skopeo or a put of a manifest. Returns the steps made."""
    made = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == stop_at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        patch.setattr("builder.engine.skopeo.copy", counted(publish.skopeo.copy))
        patch.setattr(Repository, "put", counted(Repository.put))
        tiny.publish(registry.repository)
    return made


def test_interrupted_before_any_step_no_tag_is_on_what_is_not_whole(
    tiny: Tiny, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, tagged = 1, []
    while True:
        try:
            steps_of(tiny, registry, monkeypatch, stop)
            break
        except KeyboardInterrupt:
            tagged.append([t for t in all_tags_are_whole(registry) if not t.startswith("sha256-")])
            assert list((host.store() / "publish").iterdir()) == []
            shutil.rmtree(registry.storage / "docker", ignore_errors=True)  # each time from nothing
        stop += 1
    # Compressing, the image, four documents, their index: nothing is tagged until these seven are there. Then one tag at a time.
    assert [len(t) for t in tagged] == [0] * 8 + [1, 2]
    assert len(all_tags_are_whole(registry)) == 4


def test_killed_in_the_middle_of_an_upload(tiny: Tiny, registry: Registry, tmp_path: Path) -> None:
    digest = registries.tiny_image(tiny.engine, tiny.image, tiny.lock, tmp_path / "large", extra=os.urandom(48 << 20))
    registries.verdict(tiny.image, digest, tiny.lock)
    argv = [sys.executable, "-m", "builder", "publish", tiny.image.id, "--to", registry.repository, "--json"]
    store = host.store()
    killed = subprocess.Popen(
        argv, cwd=ROOT, env=registries.environment(store), start_new_session=True, stdout=-3, stderr=-3
    )
    while killed.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # an upload ends while we look
            if any(p.stat().st_size > 1 << 20 for p in registry.storage.rglob("_uploads/*/data")):
                os.killpg(killed.pid, signal.SIGKILL)
        time.sleep(0.002)
    assert killed.returncode == -signal.SIGKILL, "the push ended before it could be killed"
    assert all_tags_are_whole(registry) == []
    done = subprocess.run(
        argv, cwd=ROOT, env=registries.environment(store), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"] is True
    assert tiny.image.id in all_tags_are_whole(registry)
    tiny.engine.api.images.remove(digest, force=True)


def test_a_wrong_password_an_unknown_certificate_and_no_registry_say_so(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    with registries.serving(tmp_path / "registry", tls=True, auth=True) as found:
        wrong = registries.authfile(tmp_path / "wrong.json", found.host, "guess")
        with pytest.raises(PublishError, match="refuses these credentials") as refused:
            tiny.publish(found.repository, replace(found.access, authfile=wrong))
        assert "docker login" in refused.value.hint
        with pytest.raises(PublishError, match=r"(?i)certificate"):
            tiny.publish(found.repository, Access(insecure=False, authfile=found.access.authfile))
    with pytest.raises(PublishError, match="can't be reached"):
        tiny.publish(found.repository, found.access)
    with pytest.raises(PublishError, match="no place to publish to"):
        tiny.publish("Not/A:Place")


def test_documents_are_attached_as_referrers(tiny: Tiny, registry: Registry) -> None:
    outcome = tiny.publish(registry.repository)
    index = json.loads(registries.fetch(registry, f"/manifests/{oci.referrers_tag(outcome.digest)}"))
    documents = {}
    for found in index["manifests"]:
        manifest = json.loads(registries.fetch(registry, f"/manifests/{found['digest']}"))
        assert manifest["subject"]["digest"] == outcome.digest
        assert manifest["artifactType"] == found["artifactType"]
        documents[found["artifactType"]] = json.loads(
            registries.fetch(registry, f"/blobs/{manifest['layers'][0]['digest']}")
        )
    bill = documents["application/vnd.cyclonedx+json"]
    licences = {c["name"]: c.get("licenses") for c in bill["components"]}
    assert licences["packaging"] == [{"expression": "Apache-2.0 OR BSD-2-Clause"}]
    assert licences["zlib1g"] == [{"license": {"name": "Zlib"}}]
    statement = documents["application/vnd.in-toto+json"]
    subjects = [s["digest"]["sha256"] for s in statement["subject"]]
    assert subjects == [d.removeprefix("sha256:") for d in (outcome.digest, tiny.digest)]
    assert documents[release.VERDICT_TYPE]["digest"] == tiny.digest
    assert documents[release.WARM_TYPE]["kernels"][0]["kernel"] == "k"


def test_a_new_verdict_takes_the_place_of_the_old_one_and_others_stay(tiny: Tiny, registry: Registry) -> None:
    outcome = tiny.publish(registry.repository)
    repository = Repository(name=registry.repository, access=registry.access, run=run)
    tag = oci.referrers_tag(outcome.digest)
    index = json.loads(repository.manifest(tag) or b"")
    foreign = {**index["manifests"][0], "artifactType": "application/vnd.example.scan"}
    repository.put(tag, oci.dumps({**index, "manifests": [foreign, *index["manifests"]]}), oci.INDEX)
    registries.verdict(tiny.image, tiny.digest, tiny.lock).write_text(tiny.verdict.read_text().replace("0.1", "0.2"))
    second = tiny.publish(registry.repository)
    changed = {n for n, d in second.attachments.items() if outcome.attachments[n] != d}
    assert changed == {"verdict.json"}
    types = [d["artifactType"] for d in json.loads(repository.manifest(tag) or b"")["manifests"]]
    assert types[0] == "application/vnd.example.scan" and len(types) == len(set(types)) == 5


class WithReferrers(http.server.BaseHTTPRequestHandler):
    """Hands everything on to a registry, and has the referrers API that docker-registry 2.8 lacks."""

    upstream = ""

    def handle_one(self) -> None:
        if "/referrers/" in self.path:
            self.reply(
                200,
                {"Content-Type": oci.INDEX},
                oci.dumps({"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": []}),
            )
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        headers = {
            k: v
            for k, v in self.headers.items()
            if k.lower() not in ("content-length", "transfer-encoding", "connection")
        }
        request = urllib.request.Request(self.upstream + self.path, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request) as answer:
                self.reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            self.reply(error.code, dict(error.headers), error.read())

    def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in ("content-length", "connection", "date", "server") or self.command == "HEAD":
                self.send_header(key, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_PATCH = do_HEAD = do_DELETE = handle_one

    def log_message(self, *_: object) -> None:
        pass


def test_a_registry_with_the_referrers_api_gets_no_tag_for_them(tiny: Tiny, registry: Registry) -> None:
    handler = type("Handler", (WithReferrers,), {"upstream": f"http://{registry.host}"})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        outcome = tiny.publish(f"127.0.0.1:{server.server_port}/team/blackwell")
        tags = all_tags_are_whole(registry)
        assert sorted(outcome.tags) == tags
        repository = Repository(name=registry.repository, access=registry.access, run=run)
        assert len([d for d in outcome.attachments.values() if repository.manifest(d)]) == 4
    finally:
        server.shutdown()


def test_an_oci_layout_with_documents_beside_it(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "layout"
    outcome = tiny.publish(f"oci:{folder}")
    found = contents.elsewhere(run, f"oci:{folder}:{tiny.image.id}", Access())
    assert found.digest == tiny.digest and found.entries == contents.local(tiny.engine, tiny.digest).entries
    beside = sorted(p.name for p in tmp_path.glob("layout.*"))
    assert beside == [
        "layout.provenance.intoto.json",
        "layout.sbom.cdx.json",
        "layout.verdict.json",
        "layout.warm.json",
    ]
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    again = tiny.publish(f"oci:{folder}")
    assert not again.pushed and set(again.tags.values()) == {"unchanged"}
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    (
        folder
        / "blobs"
        / "sha256"
        / json.loads(before[folder / "blobs" / Path(*outcome.digest.split(":"))])["layers"][0]["digest"][7:]
    ).unlink()
    assert tiny.publish(f"oci:{folder}").pushed
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_an_archive_that_docker_loads(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    assert tiny.publish(str(path)).pushed
    first = path.read_bytes()
    assert not tiny.publish(str(path)).pushed and path.read_bytes() == first
    assert sorted(p.name for p in tmp_path.glob("image.tar*")) == [
        "image.tar", "image.tar.provenance.intoto.json", "image.tar.sbom.cdx.json", "image.tar.verdict.json", "image.tar.warm.json",
    ]  # fmt: skip
    tiny.engine.api.images.remove(tiny.image.tag, force=True)
    run([tiny.engine.client, "load", "-i", path])
    found = docker.inspect(tiny.engine, tiny.image.tag)
    assert found is not None and found["Id"] == tiny.digest
    for tag in found["RepoTags"]:
        tiny.engine.api.images.remove(tag, force=True)


def test_cosign_signs_the_digest_before_any_tag_moves(
    tiny: Tiny, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for cosign records how it is called; the test below takes the real one."""
    assert tiny.publish(registry.repository).signed.startswith("not signed: cosign is not installed")
    with pytest.raises(PublishError, match="cosign is not installed"):
        tiny.publish(registry.repository, key="cosign.key", tags=("next",))
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "cosign"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("SIGSTORE_ID_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL"):
        monkeypatch.delenv(name, raising=False)
    assert "neither --sign-key" in tiny.publish(registry.repository).signed
    outcome = tiny.publish(registry.repository, key="cosign.key")
    assert outcome.signed == "signed with cosign.key"
    call = (tmp_path / "called").read_text()
    assert "--key cosign.key" in call and call.strip().endswith(f"{registry.repository}@{outcome.digest}")
    tool.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(PublishError, match="no tag was moved"):
        tiny.publish(registry.repository, key="cosign.key", tags=("next",))
    assert "next" not in all_tags_are_whole(registry)


def test_the_real_cosign_signs_over_tls_with_a_password_and_its_signature_verifies(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    monkeypatch.setenv("PATH", trixie.cosign(tmp_path / "bin"))
    run(["cosign", "generate-key-pair"], cwd=tmp_path)
    (tmp_path / "registry").mkdir()
    with registries.serving(tmp_path / "registry", tls=True, auth=True) as found:
        outcome = tiny.publish(found.repository, found.access, key=str(tmp_path / "cosign.key"))
        assert outcome.signed.startswith("signed with")
        assert found.access.authfile and found.access.certificates
        (tmp_path / "config.json").write_text(found.access.authfile.read_text())
        argv = ["cosign", "verify", "--key", str(tmp_path / "cosign.pub"), "--insecure-ignore-tlog=true"]
        argv += ["--registry-cacert", str(found.access.certificates / "ca.crt")]
        said = run([*argv, f"{found.repository}@{outcome.digest}"], env={"DOCKER_CONFIG": str(tmp_path)})
        assert outcome.digest in said
        before = found.files()
        assert tiny.publish(found.repository, found.access, key=str(tmp_path / "cosign.key")).signed == "signed already"
        assert found.files() == before
