"""Size of an image by layer, uncompressed and compressed; each distinct layer is measured once and remembered by its digest."""

import hashlib
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from builder.engine import scratch
from builder.engine.docker import Engine, existing
from builder.errors import CommandError

COMPRESSORS = {"zstd": ("zstd", "-10", "-T0", "-c", "-q"), "gzip": ("gzip", "-6", "-n", "-c")}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its digest (of the uncompressed archive), sizes in bytes, and the step that made it."""

    digest: str
    size: int
    compressed: dict[str, int]
    created_by: str


def measure(engine: Engine, reference: str, store: Path, kinds: tuple[str, ...] = ("zstd",)) -> tuple[Layer, ...]:
    """Layers of a local image, lowest first, with compressed sizes of the asked kinds. Raises NoImageError if there is no such image."""
    image = existing(engine, reference)
    digests: list[str] = image["RootFS"]["Layers"]
    known = {d: _remembered(store, d) for d in digests}
    if any(kind not in known[d].get("compressed", {}) for d in digests for kind in kinds):
        _measure_all(engine, reference, store, digests, kinds)
        known = {d: _remembered(store, d) for d in digests}
    steps = [h["CreatedBy"] for h in reversed(engine.api.images.get(reference).history()) if h["Size"] > 0]
    steps += [""] * len(digests)
    return tuple(
        Layer(digest=d, size=known[d]["size"], compressed=known[d]["compressed"], created_by=steps[i])
        for i, d in enumerate(digests)
    )


def _remembered(store: Path, digest: str) -> dict[str, Any]:
    path = store / "layers" / f"{digest.removeprefix('sha256:')}.json"
    try:
        record = json.loads(path.read_bytes())
        return {"size": int(record["size"]), "compressed": {k: int(v) for k, v in record["compressed"].items()}}
    except (
        FileNotFoundError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ):  # not there, or damaged: to be measured
        return {}


def _measure_all(engine: Engine, reference: str, store: Path, digests: list[str], kinds: tuple[str, ...]) -> None:
    argv = [str(engine.client), "save", reference]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as save:
        assert save.stdout is not None
        try:
            with tarfile.open(fileobj=save.stdout, mode="r|") as archive:
                for member in archive:
                    _measure_one(archive, member, store, digests, kinds)
        except tarfile.TarError as error:
            raise CommandError(tuple(argv), save.wait(), f"what it wrote is no archive: {error}") from error
    if save.returncode:
        raise CommandError(tuple(argv), save.returncode, "")


def _measure_one(
    archive: tarfile.TarFile, member: tarfile.TarInfo, store: Path, digests: list[str], kinds: tuple[str, ...]
) -> None:
    """Measure and remember a member of a saved image if it is a layer."""
    if not member.isfile() or not (member.name.endswith("/layer.tar") or member.name.startswith("blobs/")):
        return
    stream = archive.extractfile(member)
    assert stream is not None
    digest, size, compressed = _compress(stream, kinds)
    if f"sha256:{digest}" in digests:
        record = {"size": size, "compressed": {**_remembered(store, digest).get("compressed", {}), **compressed}}
        scratch.write(store / "layers" / f"{digest}.json", json.dumps(record))


def _compress(stream: IO[bytes], kinds: tuple[str, ...]) -> tuple[str, int, dict[str, int]]:
    """sha256, size, and compressed size by kind of a stream, read once; compressors count through temporary-free pipes."""
    counters = {
        k: subprocess.Popen(
            ["sh", "-c", '"$@" | wc -c', "sh", *COMPRESSORS[k]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for k in kinds
    }
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
        size += len(chunk)
        for counter in counters.values():
            assert counter.stdin is not None
            counter.stdin.write(chunk)
    found = {}
    for kind, counter in counters.items():
        answer, _ = counter.communicate()
        found[kind] = int(answer)
    return digest.hexdigest(), size, found
