"""Programs of Debian 13 that Debian 12 lacks or has too old: unpacked into the store, nothing of them installed.

A Docker Engine whose BuildKit rewrites times and writes registry caches (26), buildx, and cosign. They run on Debian 12's libraries.
"""

import os
from pathlib import Path

from builder.engine import docker, host, scratch
from builder.engine.environment import debian_mirror
from builder.engine.process import run

SUITE = "trixie"
PACKAGES = ("docker.io", "containerd", "docker-buildx", "cosign")


def unpacked() -> Path:
    """The root of a file system that holds the packages and what they depend on; all or nothing. Raises BuilderError."""
    root = host.store() / "test-tools" / "-".join((SUITE, *PACKAGES))
    if not root.is_dir():
        docker.require_tools(run, print, {"mmdebstrap": "mmdebstrap"})
        with scratch.directory(root.parent) as work:
            argv = ["mmdebstrap", "--mode=root", "--variant=extract", "--include=" + ",".join(PACKAGES)]
            run([*argv, '--aptopt=Acquire::Retries "3"', SUITE, work / "root", debian_mirror(run)])
            # Debian 13's runc wants its own libc; the installed one serves.
            for runc in (work / "root" / "usr").glob("*bin/runc"):
                runc.unlink()
            (work / "root").rename(root)
    return root


def dockerd() -> Path:
    """The newer Docker Engine."""
    return unpacked() / "usr" / "sbin" / "dockerd"


def buildx() -> Path:
    """buildx, which runs as a program of its own too."""
    return unpacked() / "usr" / "libexec" / "docker" / "cli-plugins" / "docker-buildx"


def cosign(folder: Path) -> str:
    """A PATH that finds cosign, through a link in `folder`, and otherwise what is installed here."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cosign").symlink_to(unpacked() / "usr" / "bin" / "cosign")
    return f"{folder}:{os.environ['PATH']}"
