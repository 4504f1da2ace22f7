"""`builder bake`'s file through the real buildx, on two separate engines with a registry between them."""

import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from builder import bake, build
from builder.engine.process import run
from builder.errors import CommandError
from tests.engine import registries, trixie
from tests.engine.conftest import Small
from tests.engine.engines import clean_engine

pytestmark = pytest.mark.slow


def thin(rootfs: Path, folder: Path) -> Path:
    """The base without the inside of its compiler and other bulk, which these builds don't use: they are about the engines."""
    bulk = re.compile(
        r"\./usr/(lib|libexec)/gcc/.*|\./usr/share/.*|.*\.a|.*/lib(gprof|bfd|opcodes|asan|tsan|lsan|hwasan|ubsan).*"
    )
    with tarfile.open(rootfs) as source, tarfile.open(folder / "thin.tar", "w") as target:
        for member in source:
            if not bulk.fullmatch(member.name):
                target.addfile(member, source.extractfile(member) if member.isreg() else None)
    return folder / "thin.tar"


def file_for(small: Small, folder: Path, to: str, cache: str) -> dict[str, Any]:
    """The bake file of a small image, as `builder bake` makes it once fingerprint and report are known.

    Its target is the stage `libraries`: the later ones need torch.
    """
    folder.mkdir(parents=True)
    build.write_context(folder / "context", small.work(), thin(small.rootfs, folder), small.uv)
    secrets = {k: p for k, p in build.secrets_of(run, folder).items() if p.stat().st_size}
    job = bake.Job(
        image=small.image,
        context=folder / "context",
        answers=folder / "answers",
        epoch=small.lock.epoch,
        secrets=secrets,
        fingerprint="0123456789abcdef",
        labels={"io.blackwell.id": small.image.id},
    )
    made = bake.bake([job], to=to, cache=cache)
    assert list(made["group"]) == list(bake.GROUPS)
    target = made["target"][bake.name(small.image)]
    target["target"] = "libraries"
    # A Docker Engine as builder can't push with rewritten times; what it would push goes into an archive.
    assert target["output"][0].startswith("type=image,push=true,")
    target["output"] = [target["output"][0].replace("type=image,push=true", f"type=oci,dest={folder}/image.tar")]
    return made


def offline(made: Mapping[str, Any], folder: Path) -> None:
    """Give the targets of a bake file a secret that keeps uv from any index."""
    (folder / "offline").write_text("export UV_OFFLINE=1\n")
    for target in made["target"].values():
        others = [secret for secret in target["secret"] if "id=network" not in secret]
        target["secret"] = [*others, f"id=network,src={folder}/offline"]


def manifest_of(archive: Path) -> dict[str, Any]:
    """The manifest in the archive of an OCI layout."""
    with tarfile.open(archive) as tar:
        index = json.load(tar.extractfile("index.json") or io.BytesIO())
        digest = index["manifests"][0]["digest"].replace(":", "/")
        return dict(json.load(tar.extractfile(f"blobs/{digest}") or io.BytesIO()))


def baked(host: str, made: Mapping[str, Any], folder: Path) -> str:
    """Bake the group `image` on the engine at `host`; returns what buildx said."""
    (folder / "bake.json").write_text(json.dumps(made))
    said: list[str] = []
    # An engine of a test's own has only the host's network; a bake file can't say that before buildx 0.15, a Compose file can.
    services = {
        key: {"build": {"context": target["context"], "network": "host"}} for key, target in made["target"].items()
    }
    (folder / "network.yaml").write_text(json.dumps({"services": services}))
    argv = [
        trixie.buildx(),
        "bake",
        "--progress",
        "plain",
        "-f",
        folder / "bake.json",
        "-f",
        folder / "network.yaml",
        "image",
    ]
    run(argv, env={"DOCKER_HOST": host, "DOCKER_CONFIG": str(folder)}, on_line=said.append)
    return "\n".join(said)


def test_two_engines_bake_one_digest_and_a_third_bakes_from_the_cache(small: Small, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    with registries.serving(tmp_path / "registry") as registry:
        digests = []
        for name in ("one", "two"):
            to = f"{registry.host}/{name}"
            made = file_for(small, tmp_path / name / "files", to, f"{registry.host}/cache-{name}")
            printed = json.loads(run([trixie.buildx(), "bake", "-f", "-", "--print", "image"], text=json.dumps(made)))
            assert list(printed["target"]) == [bake.name(small.image)]
            with clean_engine(tmp_path / name / "engine", trixie.dockerd(), **{"containerd-snapshotter": True}) as host:
                baked(host, made, tmp_path / name)
            digests.append(manifest_of(tmp_path / name / "files" / "image.tar"))
        assert len(digests[0]["layers"]) == 3
        assert digests[0] == digests[1]

        made = file_for(small, tmp_path / "three" / "files", f"{registry.host}/three", f"{registry.host}/cache-one")
        with clean_engine(tmp_path / "three" / "engine", trixie.dockerd(), **{"containerd-snapshotter": True}) as host:
            # Secrets are no part of a step's key: without an index nothing can be installed, yet from the cache all comes.
            offline(made, tmp_path / "three")
            without = {
                **made,
                "target": {
                    key: {name: value for name, value in target.items() if name != "cache-from"}
                    for key, target in made["target"].items()
                },
            }
            with pytest.raises(CommandError, match="exit code"):
                baked(host, without, tmp_path / "three")
            said = baked(host, made, tmp_path / "three")
            assert len(re.findall(r"(?m)^#\d+ CACHED", said)) >= 2, said
