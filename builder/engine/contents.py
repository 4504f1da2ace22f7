"""What an image holds, file by file: from a local image, or from an archive, an OCI layout or a registry through skopeo."""

import contextlib
import gzip
import hashlib
import json
import os
import re
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.engine import scratch, skopeo
from builder.engine.docker import Engine, existing, inspect
from builder.engine.process import Runner
from builder.errors import CommandError, DamagedError, SelectionError

FORMAT = 3
READER = "io.blackwell.reader"  # label of the container that an image is read from: the process that made it
# What Docker takes as the name of an image; it calls anything else a bad request.
LOCAL = re.compile(
    r"(?:[\w.-]+(?::\d+)?/)?[a-z0-9._/-]+(?::[\w.-]{1,128})?(?:@?sha256:[0-9a-f]{64})?|sha256:[0-9a-f]{64}", re.ASCII
)
# Files whose text the host side reads: what the image says of itself, and the licences of what is inside.
TEXTS = re.compile(
    r"opt/blackwell/(image\.json|lock\.toml|cache/summary\.json|cache/\w+/report\.json)"
    r"|var/lib/dpkg/status|usr/share/doc/[^/]+/copyright|opt/venv/.*\.dist-info/METADATA"
)
# What Docker puts into every container, so that an export can't tell whether the image has it; left out everywhere.
OF_CONTAINERS = re.compile(r"\.dockerenv|(dev|proc|sys)(/.*)?|etc/(hosts|hostname|resolv\.conf|mtab)")
KINDS = {tarfile.REGTYPE: "file", tarfile.AREGTYPE: "file", tarfile.DIRTYPE: "directory", tarfile.SYMTYPE: "link"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One path: kind (file, directory, link, hard link, other), mode bits, owner, size in bytes, sha256 of the content or a link's target."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """An image's file tree, without OF_CONTAINERS, and labels. `digest` is that of its configuration; `texts` holds the files that TEXTS names."""

    reference: str
    digest: str
    labels: Mapping[str, str]
    entries: Mapping[str, Entry]
    texts: Mapping[str, str]

    def text(self, pattern: str) -> str | None:
        """The first text whose path fits the pattern, or None."""
        return next((t for p, t in sorted(self.texts.items()) if re.fullmatch(pattern, p)), None)


def local(engine: Engine, reference: str, store: Path | None = None) -> Contents:
    """Contents of a local image; read once, then kept in the store by digest. Raises NoImageError if there is none."""
    found = existing(engine, reference)
    digest, labels = str(found["Id"]), dict(found["Config"].get("Labels") or {})
    kept = store / "contents" / f"{digest.removeprefix('sha256:')}.json.gz" if store else None
    if kept and (remembered := _remembered(kept)):
        entries, texts = remembered
        return Contents(reference=reference, digest=digest, labels=labels, entries=entries, texts=texts)
    entries, texts = _exported(engine, digest)
    if kept:
        rows = {p: [e.kind, e.mode, e.uid, e.gid, e.size, e.digest] for p, e in entries.items()}
        data = json.dumps({"format": FORMAT, "entries": rows, "texts": texts}).encode()
        scratch.write(kept, gzip.compress(data, 1))
    return Contents(reference=reference, digest=digest, labels=labels, entries=entries, texts=texts)


def _remembered(kept: Path) -> tuple[dict[str, Entry], dict[str, str]] | None:
    """File tree and texts from the store, or None where they are not there, damaged, or of another format."""
    try:
        data = json.loads(gzip.decompress(kept.read_bytes()))
        if data["format"] != FORMAT:
            return None
        rows = data["entries"].items()
        entries = {p: Entry(kind=e[0], mode=e[1], uid=e[2], gid=e[3], size=e[4], digest=e[5]) for p, e in rows}
        return entries, dict(data["texts"])
    except (
        FileNotFoundError,
        gzip.BadGzipFile,
        EOFError,
        zlib.error,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        return None


def _exported(engine: Engine, digest: str) -> tuple[dict[str, Entry], dict[str, str]]:
    _sweep(engine)
    container = engine.api.containers.create(digest, ["nothing"], labels={READER: str(os.getpid())})
    try:
        argv = [str(engine.client), "export", str(container.id)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=1 << 20) as export:
            assert export.stdout is not None
            with tarfile.open(fileobj=export.stdout, mode="r|", bufsize=1 << 20) as archive:
                result = merge([archive])
            while export.stdout.read(1 << 20):  # padding after the archive's end
                pass
        if export.returncode:
            raise CommandError(tuple(argv), export.returncode, "")
        return result
    except tarfile.TarError as error:
        raise CommandError(tuple(argv), export.returncode, f"what it wrote is no archive: {error}") from error
    finally:
        container.remove(force=True)


def _sweep(engine: Engine) -> None:
    """Remove the containers (never started) that killed commands of this machine left."""
    for container in engine.api.containers.list(all=True, filters={"label": READER, "status": "created"}):
        if not Path("/proc", container.labels[READER]).exists():
            container.remove()


def elsewhere(run: Runner, reference: str, access: skopeo.Access) -> Contents:
    """Contents of an image that skopeo can reach (docker://..., oci:..., oci-archive:..., docker-archive:...)."""
    with scratch.directory() as folder:
        skopeo.copy(run, reference, f"dir:{folder}", access, "--dest-decompress")
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
            digest = str(manifest["config"]["digest"])
            config = json.loads((folder / digest.removeprefix("sha256:")).read_bytes())
            layers_of = [str(layer["digest"]) for layer in manifest["layers"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SelectionError(
                f"{reference} is no image: its manifest has no configuration and layers",
                hint="name an image; an attachment or an index of images is none",
            ) from error

        def layers() -> Iterator[tarfile.TarFile]:
            for layer in layers_of:
                path = folder / layer.removeprefix("sha256:")
                with tarfile.open(path, "r:") as archive:
                    yield archive
                path.unlink()

        entries, texts = merge(layers())
        labels = dict(config.get("config", {}).get("Labels") or {})
    return Contents(reference=reference, digest=digest, labels=labels, entries=entries, texts=texts)


def merge(layers: Iterable[tarfile.TarFile]) -> tuple[dict[str, Entry], dict[str, str]]:
    """File tree and texts of layers laid over each other, lowest first; whiteouts (`.wh.`) of the OCI image format apply."""
    entries: dict[str, Entry] = {}
    texts: dict[str, str] = {}
    for archive in layers:
        fresh: set[str] = set()
        for member in archive:
            path = member.name.removeprefix("./").strip("/")
            folder, _, name = path.rpartition("/")
            if name == ".wh..wh..opq":
                _remove(
                    entries, texts, [p for p in entries if p.startswith(f"{folder}/".lstrip("/")) and p not in fresh]
                )
            elif name.startswith(".wh."):
                gone = f"{folder}/{name[4:]}".lstrip("/")
                _remove(entries, texts, [p for p in entries if p == gone or p.startswith(gone + "/")])
            elif path and not OF_CONTAINERS.fullmatch(path):
                fresh.add(path)
                entries[path] = _entry(archive, member, path, texts)
    return entries, {**texts, **_linked(entries, texts)}


def _linked(entries: Mapping[str, Entry], texts: Mapping[str, str]) -> dict[str, str]:
    """Copyright files that are links to another package's, or lie in a directory that is one, as Debian has them."""
    found = {}
    for path, entry in entries.items():
        if entry.kind == "link" and re.fullmatch(r"usr/share/doc/[^/]+(/copyright)?", path):
            target = os.path.normpath(f"{path.rpartition('/')[0]}/{entry.digest}").lstrip("/")
            suffix = "" if path.endswith("/copyright") else "/copyright"
            if target + suffix in texts:
                found[path + suffix] = texts[target + suffix]
    return found


def _remove(entries: dict[str, Entry], texts: dict[str, str], gone: Iterable[str]) -> None:
    for path in gone:
        del entries[path]
        texts.pop(path, None)


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, texts: dict[str, str]) -> Entry:
    facts: dict[str, Any] = {"mode": member.mode & 0o7777, "uid": member.uid, "gid": member.gid, "size": member.size}
    kind = "hard link" if member.islnk() else KINDS.get(member.type, "other")
    if kind != "file":
        return Entry(kind=kind, digest=member.linkname, **facts)
    stream = archive.extractfile(member)
    assert stream is not None
    if TEXTS.fullmatch(path):
        data = stream.read()
        texts[path] = data.decode(errors="replace")
        return Entry(kind=kind, digest=hashlib.sha256(data).hexdigest(), **facts)
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return Entry(kind=kind, digest=digest.hexdigest(), **facts)


def resolve(run: Runner, engine: Engine | None, word: str, store: Path, access: skopeo.Access) -> Contents:
    """Contents of what a person names: an identifier, a local tag or digest, an archive, a layout, or HOST/REPO@DIGEST.

    Raises SelectionError when it is none of them.
    """
    path = Path(word.partition(":")[2] if word.startswith("oci:") else word)
    if _is(path / "oci-layout", Path.is_file):
        with _readable(word):
            return elsewhere(
                run, f"oci:{path}:{_first_reference(json.loads((path / 'index.json').read_bytes()))}", access
            )
    if _is(path, Path.is_file):
        with _readable(word):
            return elsewhere(run, _archive(path), access)
    if re.match(r"^(docker|oci|oci-archive|docker-archive|dir):", word):
        return elsewhere(run, word, access)
    for reference in (f"blackwell:{word}", word):
        if engine and _sayable(reference) and inspect(engine, reference):
            return local(engine, reference, store)
    if "/" in word and _sayable(word):
        return elsewhere(run, f"docker://{word}", access)
    raise SelectionError(
        f"{word[:200]!r} is no image here, no archive and no layout",
        hint="give an identifier of a built image, a local tag or digest, a file, oci:DIRECTORY, or HOST/REPO:TAG",
    )


def _sayable(reference: str) -> bool:
    """Is this a name that Docker doesn't call a bad request?"""
    return len(reference) <= 255 and LOCAL.fullmatch(reference) is not None


def _is(path: Path, what: Callable[[Path], bool]) -> bool:
    try:
        return what(path)
    except OSError:  # too long for a name
        return False


@contextlib.contextmanager
def _readable(word: str) -> Iterator[None]:
    """Say which archive or layout it is that can't be read."""
    try:
        yield
    except tarfile.TarError as error:
        raise DamagedError(
            f"{word} is no tar archive, or one that was cut off", hint="publish it anew, or name another file"
        ) from error
    except (FileNotFoundError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{word} is no archive of an image, and no OCI layout that is whole: {str(error) or type(error).__name__}",
            hint="publish it anew (`builder publish` mends a layout), or name another",
        ) from error


def _archive(path: Path) -> str:
    with tarfile.open(path) as archive:
        if "index.json" not in archive.getnames():
            return f"docker-archive:{path}"
        member = archive.extractfile("index.json")
        assert member is not None
        return f"oci-archive:{path}:{_first_reference(json.load(member))}"


def _first_reference(index: Mapping[str, Any]) -> str:
    """The first name in an index of images; an index without names has one image, which needs none."""
    names = [m.get("annotations", {}).get("org.opencontainers.image.ref.name", "") for m in index["manifests"]]
    return next((n for n in names if n), "")
