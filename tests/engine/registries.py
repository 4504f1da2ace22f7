"""A real registry (Debian's docker-registry) on loopback, with and without TLS and a password; and a tiny image to push."""

import contextlib
import json
import os
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from builder import flow
from builder.build import LABEL
from builder.engine import docker
from builder.engine.process import run
from builder.engine.skopeo import Access
from builder.values import Image, Lock
from builder.verify import TestResult as Result
from builder.verify import Verdict

USER, PASSWORD = "ci", "not-a-real-password"


@dataclass(frozen=True, kw_only=True)
class Registry:
    """A running registry: its HOST:PORT, where it keeps things, and how to reach it."""

    host: str
    storage: Path
    access: Access

    @property
    def repository(self) -> str:
        return f"{self.host}/team/blackwell"

    def files(self) -> dict[str, int]:
        """Everything that it keeps, with the time of the last change in ns; unfinished uploads are left out."""
        found = [p for p in self.storage.rglob("*") if p.is_file() and "_uploads" not in p.parts]
        return {str(p.relative_to(self.storage)): p.stat().st_mtime_ns for p in found}


@contextlib.contextmanager
def serving(folder: Path, *, tls: bool = False, auth: bool = False) -> Iterator[Registry]:
    """Start a registry that keeps its data in `folder`, and stop it."""
    docker.require_tools(
        run, print, {"docker-registry": "docker-registry", "openssl": "openssl", "htpasswd": "apache2-utils"}
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    storage, certificates = folder / "storage", folder / "certificates"
    http: dict[str, object] = {"addr": f"127.0.0.1:{port}"}
    config: dict[str, object] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(storage)}},
        "http": http,
    }
    access = Access()
    if tls:
        certificates.mkdir(parents=True)
        argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        argv += [
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            folder / "key.pem",
            "-out",
            certificates / "ca.crt",
        ]
        run([str(a) for a in argv])
        http["tls"] = {"certificate": str(certificates / "ca.crt"), "key": str(folder / "key.pem")}
        access = Access(certificates=certificates)
    if auth:
        (folder / "htpasswd").write_text(run(["htpasswd", "-Bbn", USER, PASSWORD]))
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
        access = Access(
            certificates=access.certificates, authfile=authfile(folder / "auth.json", f"127.0.0.1:{port}", PASSWORD)
        )
    (folder / "config.json").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", folder / "config.json"], stdout=log, stderr=log)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield Registry(host=f"127.0.0.1:{port}", storage=storage, access=access)
    finally:
        process.terminate()
        process.wait(timeout=20)


def authfile(path: Path, host: str, password: str) -> Path:
    """Credentials as `docker login` writes them."""
    from base64 import b64encode

    path.write_text(json.dumps({"auths": {host: {"auth": b64encode(f"{USER}:{password}".encode()).decode()}}}))
    return path


FILES: Mapping[str, str] = {
    "opt/blackwell/cache/0123abcd/report.json": json.dumps(
        {"format": 1, "kernels": [{"kernel": "k", "target": {"arch": 121}}]}
    ),
    "opt/venv/lib/python3.13/site-packages/packaging-26.4.dist-info/METADATA": "Metadata-Version: 2.4\nName: packaging\nVersion: 26.4\nLicense-Expression: Apache-2.0 OR BSD-2-Clause\n\n",
    "usr/share/doc/zlib1g/copyright": "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: Zlib\n free\n",
    "etc/first": "first\n",
}


def tiny_image(engine: docker.Engine, image: Image, locked: Lock, folder: Path, extra: bytes = b"second\n") -> str:
    """Build and tag an image of three small layers with an image's labels; returns its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "root.tar", "w") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, BytesIO(text.encode()))
    (folder / "second").write_bytes(extra)
    (folder / "Dockerfile").write_text(
        "FROM scratch\nADD root.tar /\nCOPY second /etc/second\nCOPY second /etc/third\n"
    )
    labels = {
        LABEL + "id": image.id,
        LABEL + "lock": locked.checksum,
        LABEL + "inputs": "sha256:" + "0" * 64,
        "org.opencontainers.image.title": "tiny",
    }
    request = docker.BuildRequest(context=folder, target="", tag=image.tag, labels=labels)
    words: list[str | Path] = [engine.client, "build", "--tag", request.tag, folder]
    for key, value in labels.items():
        words[2:2] = ["--label", f"{key}={value}"]
    run(words, env={"DOCKER_BUILDKIT": "1"}, on_line=lambda _line: None)
    found = docker.inspect(engine, image.tag)
    assert found is not None
    return str(found["Id"])


def verdict(image: Image, digest: str, locked: Lock, outcome: str = "passed") -> Path:
    """Keep a verdict with one test of this outcome."""
    made = Verdict(
        id=image.id, digest=digest, lock=locked.checksum, tests=(Result(name="t", outcome=outcome, seconds=0.1),)
    )
    path = flow.verdict_path(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(made.dumps())
    return path


def fetch(registry: Registry, path: str) -> bytes:
    """GET from a registry without TLS or password."""
    accept = {"Accept": "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{registry.host}/v2/team/blackwell{path}", headers=accept)
    ) as answer:
        return bytes(answer.read())


def environment(store: Path) -> dict[str, str]:
    """This process's environment with another store."""
    return {**os.environ, "BUILDER_STORE": str(store)}
