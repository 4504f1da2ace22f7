"""Bootstrap a Debian root file system with mmdebstrap; no container registry is needed."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from builder.engine import scratch
from builder.engine.environment import debian_mirror
from builder.engine.process import Runner, network_failed
from builder.errors import CommandError, DriftError, NetworkError
from builder.values import Base, DebianPackage, checksum

# What a root file system of ours leaves out; licences (copyright files) and apt's own example stay.
EXCLUDES = (
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/doc/*",
    "/usr/share/lintian/*",
    "/usr/share/bug/*",
)
KEEPS = ("/usr/share/doc/*/copyright", "/usr/share/doc/apt/examples/sources.list")

# Runs in the new root. The image's apt sources are Debian's public ones, as apt's own example names them: a company's
# mirror, which the bootstrap may have used, must not stay in a layer.
_FINISH = r"""
set -eu
root=$1
suite=$2
example="$root/usr/share/doc/apt/examples/sources.list"
public=$(sed -n 's/^deb \(http[^ ]*\) .*/\1/p' "$example" | head -n 1)
rm -f "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*
printf 'Types: deb\nURIs: %s\nSuites: %s %s-updates\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
    "$public" "$suite" "$suite" > "$root/etc/apt/sources.list.d/debian.sources"
rm -rf "$root"/var/log/* "$root"/var/cache/* "$root"/var/lib/apt/lists/* "$root"/etc/apt/apt.conf.d/99mmdebstrap
find "$root/usr/lib" -name '*.a' -path '*python3*' -delete
"""


def simulate(run: Runner, base: Base, arch: str) -> tuple[DebianPackage, ...]:
    """The packages that a bootstrap would install now, without installing them; works for a foreign architecture.

    Raises NetworkError when the mirror can't be reached.
    """
    with scratch.directory() as work:
        argv = _command(run, base, arch, work / "nothing.tar", "--simulate", "--verbose", "--skip=check/qemu")
        output = _run(run, base, argv, {"TMPDIR": str(work)})
    found = re.findall(r"^Inst (\S+) \((\S+) ", output, flags=re.MULTILINE)
    return parse_packages("".join(f"{name}={version}\n" for name, version in set(found)))


def bootstrap(run: Runner, base: Base, arch: str, epoch: int, out: Path) -> tuple[DebianPackage, ...]:
    """Write a root file system as a tar archive to `out` (all or nothing) and return the packages in it.

    Raises NetworkError when the mirror can't be reached.
    """
    with scratch.directory(out.parent) as work:
        partial, listing, finish = work / "rootfs.tar", work / "packages", work / "finish.sh"
        finish.write_text(_FINISH, encoding="utf-8")
        options = [f"--dpkgopt=path-exclude={p}" for p in EXCLUDES] + [f"--dpkgopt=path-include={p}" for p in KEEPS]
        hooks = [
            f"--customize-hook=chroot \"$1\" dpkg-query -W -f '${{Package}}=${{Version}}\\n' > {shlex.quote(str(listing))}",
            f'--customize-hook=sh {shlex.quote(str(finish))} "$1" {base.suite}',
        ]
        argv = _command(run, base, arch, partial, *options, *hooks)
        _run(run, base, argv, {"SOURCE_DATE_EPOCH": str(epoch), "TMPDIR": str(work)})
        packages = parse_packages(listing.read_text(encoding="utf-8"))
        shutil.move(partial, out)
    return packages


def _run(run: Runner, base: Base, argv: list[str], env: dict[str, str]) -> str:
    """Run mmdebstrap. Raises NetworkError when the mirror can't be reached."""
    try:
        return run(argv, env=env, on_line=lambda _line: None)
    except CommandError as error:
        if network_failed(error.output):
            raise NetworkError(
                f"the Debian mirror can't be reached while bootstrapping {base.suite}:\n"
                + "\n".join([line for line in error.output.splitlines() if network_failed(line)][:5]),
                hint="check the network and DEBIAN_MIRROR, then run the same command again",
            ) from error
        raise


def _command(run: Runner, base: Base, arch: str, out: Path, *more: str) -> list[str]:
    argv = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--architectures={arch}",
        f"--components={','.join(base.components)}",
    ]
    argv += [f"--include={','.join(base.packages)}", '--aptopt=Acquire::Retries "3"', *more]
    return [*argv, base.suite, str(out), debian_mirror(run)]


def parse_packages(listing: str) -> tuple[DebianPackage, ...]:
    """Read lines "name=version" into packages, in name order."""
    pairs = (line.partition("=") for line in listing.splitlines() if line)
    return tuple(DebianPackage(name=n, version=v) for n, _, v in sorted(pairs))


def locked_rootfs(run: Runner, base: Base, arch: str, epoch: int, locked: Sequence[DebianPackage], store: Path) -> Path:
    """The root file system with exactly the locked packages: from the store, else bootstrapped and compared.

    Raises DriftError, naming the packages, when the mirror no longer serves the locked versions; nothing is stored then.
    """
    key = checksum(
        [
            base.suite,
            arch,
            epoch,
            base.components,
            base.packages,
            EXCLUDES,
            _FINISH,
            [(p.name, p.version) for p in locked],
        ]
    )
    path = store / f"{base.name}-{arch}-{key.removeprefix('sha256:')[:16]}.tar"
    if _whole(path):
        return path
    with scratch.directory(store) as work:
        candidate = work / path.name
        found = bootstrap(run, base, arch, epoch, candidate)
        if differences := compare_packages(locked, found):
            raise DriftError(
                f"the Debian mirror serves other packages for {base.name} than the lock pins:\n"
                + "\n".join(f"  {d}" for d in differences[:20]),
                hint="refresh the lock with `builder lock`, or point DEBIAN_MIRROR at a snapshot from the day of the lock",
            )
        if path.is_dir():
            path.rename(work / "damaged")
        candidate.replace(path)
    return path


def _whole(archive: Path) -> bool:
    """Is the archive there, down to the blocks of zeros that end one? One that was cut off is not."""
    if not archive.is_file() or archive.stat().st_size < 1024:
        return False
    with archive.open("rb") as file:
        file.seek(-1024, os.SEEK_END)
        return not any(file.read())


def compare_packages(locked: Sequence[DebianPackage], found: Sequence[DebianPackage]) -> list[str]:
    """Differences between two package lists, one line each; empty if they are the same."""
    want = {p.name: p.version for p in locked}
    have = {p.name: p.version for p in found}
    return [
        f"{n}: locked {want.get(n, 'none')}, found {have.get(n, 'none')}"
        for n in sorted(want.keys() | have.keys())
        if want.get(n) != have.get(n)
    ]
