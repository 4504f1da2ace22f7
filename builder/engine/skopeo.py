"""skopeo carries images between Docker, OCI layouts, archives and registries."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.engine.docker import require_tools
from builder.engine.process import Runner
from builder.errors import CommandError, PublishError

_LOOPBACK = re.compile(r"^(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/|$)")


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach a registry.

    `authfile` is in Docker's format (None: skopeo's and Docker's own files are looked at), `certificates` a directory with
    *.crt (authorities) and *.cert with *.key (client). `insecure` allows plain HTTP and unchecked certificates; None means
    what Docker does: only on loopback, and there only if no certificates are given.
    """

    authfile: Path | None = None
    certificates: Path | None = None
    insecure: bool | None = None

    def verifies(self, reference: str) -> bool:
        """Must TLS be there and its certificate be right for this HOST/REPO?"""
        if self.insecure is not None:
            return not self.insecure
        return self.certificates is not None or not _LOOPBACK.match(reference)

    def options(self, reference: str, side: str) -> list[str | Path]:
        """skopeo's options for a reference; `side` is "src-", "dest-" or "" (commands with one image)."""
        words: list[str | Path] = [f"--{side}tls-verify={str(self.verifies(reference)).lower()}"]
        words += [f"--{side}cert-dir", self.certificates] if self.certificates else []
        return [*words, f"--{side}authfile", self.authfile] if self.authfile else words


def require(run: Runner, say: Callable[[str], None]) -> None:
    """Install skopeo where it is missing."""
    require_tools(run, say, {"skopeo": "skopeo"})


def copy(run: Runner, source: str, destination: str, access: Access, *options: str) -> None:
    """Copy one image or artifact from a transport reference to another. Raises PublishError."""
    words: list[str | Path] = ["skopeo", "copy", "--quiet", *options]
    for reference, side in ((source, "src-"), (destination, "dest-")):
        if reference.startswith("docker://"):
            words += access.options(reference.removeprefix("docker://"), side)
    try:
        run([*words, source, destination])
    except CommandError as error:
        raise explain(error, destination if destination.startswith("docker://") else source) from error


# What skopeo says, what that means, and what to do.
_CAUSES: Sequence[tuple[tuple[str, ...], str, str]] = (
    (
        ("unauthorized", "authentication required", "denied"),
        "the registry refuses these credentials",
        "log in with `docker login` or `skopeo login`, or name a file with --authfile",
    ),
    (
        ("certificate signed by unknown", "x509", "failed to verify certificate"),
        "the registry's certificate is not trusted",
        "give its authority with --cert-dir DIRECTORY (a *.crt file), or accept any with --insecure",
    ),
    (
        ("server gave HTTP response to HTTPS",),
        "the registry speaks plain HTTP",
        "allow that with --insecure",
    ),
    (
        ("connection refused", "no such host", "i/o timeout", "network is unreachable"),
        "the registry can't be reached",
        "check the address and the network, then run the same command again: what is there already is not sent twice",
    ),
    (("no space left on device",), "a disk is full", "free some; TMPDIR says where temporary files go"),
)


def explain(error: CommandError, reference: str) -> PublishError:
    """The failure of a transport in one sentence."""
    said = error.output.strip().rpartition("msg=")[2].strip('"') or error.output.strip()
    for marks, cause, hint in _CAUSES:
        if any(mark.lower() in error.output.lower() for mark in marks):
            return PublishError(f"{reference}: {cause}: {said[:400]}", hint=hint)
    return PublishError(f"{reference}: skopeo failed: {said[:800]}", hint="the same command can be run again")
