"""Resolve and fetch Python distributions with uv, under the host's index settings."""

import re
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

from builder.engine import scratch
from builder.engine.environment import ca_bundle, index_environment, uv_configuration
from builder.engine.process import Runner, network_failed
from builder.errors import CommandError, HashMismatchError, NetworkError, ResolveError
from builder.values import checksum

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)")
_HASH = re.compile(r"--hash=(\S+)")
PLATFORMS = {"linux/amd64": "x86_64-manylinux_2_28", "linux/arm64": "aarch64-manylinux_2_28"}

# causal-conv1d's metadata can't be built without a CUDA compiler (https://github.com/Dao-AILab/causal-conv1d/issues/108), so
# the resolver gets what its setup.py declares; to be removed when its sdist carries static metadata.
_DEPENDENCY_METADATA = (
    '[[dependency-metadata]]\nname = "causal-conv1d"\nrequires-dist = ["torch", "packaging", "ninja"]\n'
)


def environment(run: Runner) -> dict[str, str]:
    """Variables for uv: the host's indexes and certificates, and no Python downloads behind the user's back."""
    bundle = ca_bundle()
    return {
        **index_environment(run),
        "UV_PYTHON_DOWNLOADS": "never",
        **({"SSL_CERT_FILE": str(bundle)} if bundle else {}),
    }


def resolve(
    run: Runner,
    requirements: Sequence[str],
    *,
    python: str,
    platform: str,
    overrides: Sequence[str] = (),
    constraints: Sequence[str] = (),
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Resolve to name -> (version, hashes). Raises ResolveError (no solution) or NetworkError (index out of reach)."""
    with scratch.directory() as folder:
        for name, lines in {
            "requirements.in": requirements,
            "overrides": overrides,
            "constraints": constraints,
        }.items():
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        own = uv_configuration()
        (folder / "uv.toml").write_text(
            (own.read_text(encoding="utf-8") + "\n" if own else "") + _DEPENDENCY_METADATA, encoding="utf-8"
        )
        argv = [find_uv_bin(), "pip", "compile", "-q", "--config-file", "uv.toml", "--python-version", python]
        argv += [
            "--python-platform",
            PLATFORMS[platform],
            "--generate-hashes",
            "--no-annotate",
            "--no-header",
            "--no-emit-index-url",
        ]
        argv += [
            "--override",
            "overrides",
            "--constraint",
            "constraints",
            "--only-binary",
            ":all:",
            "--no-binary",
            "causal-conv1d",
            "requirements.in",
        ]
        try:
            text = run(argv, cwd=folder, env=environment(run))
        except CommandError as error:
            if network_failed(error.output):
                raise _out_of_reach(error) from error
            raise ResolveError(
                "no set of distributions fits this row:\n" + error.tail, hint="mend the row in matrices/"
            ) from error
    return parse_requirements(text)


def parse_requirements(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Read a hashed requirements file: name -> (version, hashes). Raises ResolveError if a pin has no hash."""
    pins: dict[str, tuple[str, tuple[str, ...]]] = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        pin = _PIN.match(block)
        hashes = tuple(sorted(_HASH.findall(block)))
        if not pin or not hashes:
            raise ResolveError(
                f"the resolver answered with a line that is no hashed pin: {block[:80]!r}",
                hint="an index without hashes (PEP 503) can't be locked from: name another one in pip's or uv's settings",
            )
        pins[pin[1].lower().replace("_", "-")] = (pin[2], hashes)
    return pins


def fetch(run: Runner, requirements: str, *, python: str, platform: str, target: Path) -> None:
    """Install hashed requirements (text of a requirements file) for `platform` into the directory `target`."""
    with scratch.directory() as work:
        file = work / "requirements.txt"
        file.write_text(requirements, encoding="utf-8")
        argv = [find_uv_bin(), "pip", "install", "-q", "--target", str(target), "--python-version", python]
        argv += [
            "--python-platform",
            PLATFORMS[platform],
            "--no-deps",
            "--only-binary",
            ":all:",
            "--require-hashes",
            "-r",
            str(file),
        ]
        try:
            run(argv, env=environment(run))
        except CommandError as error:
            if network_failed(error.output):
                raise _out_of_reach(error) from error
            if "ash mismatch" in error.output:
                raise HashMismatchError(
                    "a tool that was downloaded differs from the lock:\n" + error.tail,
                    hint="don't trust that index; or refresh the lock with `builder lock`",
                ) from error
            raise


def _out_of_reach(error: CommandError) -> NetworkError:
    return NetworkError(
        "the package index can't be reached:\n" + error.tail,
        hint="check the network and the index settings of pip and uv, then try again",
    )


def tool(run: Runner, requirements: str, *, python: str, platform: str, store: Path) -> Path:
    """The locked uv program for an image's platform, from the store or fetched."""
    folder = store / f"{checksum([requirements, platform]).removeprefix('sha256:')[:16]}"
    if not _whole(folder):
        with scratch.directory(store) as work:
            fetch(run, requirements, python=python, platform=platform, target=work / "tree")
            if folder.exists():
                folder.rename(work / "damaged")
            (work / "tree").rename(folder)
    return folder / "bin" / "uv"


def _whole(folder: Path) -> bool:
    """Is the tool there, as long as its own record says?"""
    tool = folder / "bin" / "uv"
    lengths = [
        r.split(",")[-1]
        for p in folder.glob("*/RECORD")
        for r in p.read_text(encoding="utf-8").splitlines()
        if "bin/uv," in r
    ]
    return tool.is_file() and str(tool.stat().st_size) in lengths
