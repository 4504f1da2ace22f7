"""Resolve and fetch Python distributions with uv, under the host's index settings."""

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

from builder.engine.environment import ca_bundle, index_environment, uv_configuration
from builder.engine.process import Runner
from builder.errors import CommandError, NetworkError, ResolveError
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
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for name, lines in {
            "requirements.in": requirements,
            "overrides": overrides,
            "constraints": constraints,
        }.items():
            (folder / name).write_text("".join(f"{line}\n" for line in lines))
        own = uv_configuration()
        (folder / "uv.toml").write_text((own.read_text() + "\n" if own else "") + _DEPENDENCY_METADATA)
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
            if any(
                w in error.output
                for w in ("error sending request", "dns error", "Failed to fetch", "Could not connect", "timed out")
            ):
                raise NetworkError(
                    "the package index can't be reached:\n" + error.message,
                    hint="check the network and the index settings of pip and uv, then try again",
                ) from error
            raise ResolveError(
                "no set of distributions fits this row:\n" + error.message, hint="mend the row in matrices/"
            ) from error
    return parse_requirements(text)


def parse_requirements(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Read a hashed requirements file: name -> (version, hashes). Raises ResolveError if a pin has no hash."""
    pins: dict[str, tuple[str, tuple[str, ...]]] = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        pin = _PIN.match(block)
        hashes = tuple(sorted(_HASH.findall(block)))
        if not pin or not hashes:
            raise ResolveError(f"the resolver answered with a line that is no hashed pin: {block[:80]!r}")
        pins[pin[1].lower().replace("_", "-")] = (pin[2], hashes)
    return pins


def fetch(run: Runner, requirements: str, *, python: str, platform: str, target: Path) -> None:
    """Install hashed requirements (text of a requirements file) for `platform` into the directory `target`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements)
        file.flush()
        argv = [find_uv_bin(), "pip", "install", "-q", "--target", str(target), "--python-version", python]
        argv += [
            "--python-platform",
            PLATFORMS[platform],
            "--no-deps",
            "--only-binary",
            ":all:",
            "--require-hashes",
            "-r",
            file.name,
        ]
        run(argv, env=environment(run))


def tool(run: Runner, requirements: str, *, python: str, platform: str, store: Path) -> Path:
    """The locked uv program for an image's platform, from the store or fetched."""
    folder = store / f"{checksum([requirements, platform]).removeprefix('sha256:')[:16]}"
    if not (folder / "bin" / "uv").exists():
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store, prefix=".part-") as part:
            fetch(run, requirements, python=python, platform=platform, target=Path(part) / "tree")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(part) / "tree").rename(folder)
    return folder / "bin" / "uv"
