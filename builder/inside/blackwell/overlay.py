"""A writable view of the baked kernel cache: real directories that hold symbolic links to every baked file.

The baked cache is owned by root and often lies on a read-only root, while Triton and Inductor want to write what they
miss. They look files up by path, so a link is as good as the file; absolute paths inside baked group files stay true;
new entries become real files in the overlay, and both write by rename, which replaces a link instead of following it.
Imported when torch or triton is: only small standard modules here.
"""

# pathlib would cost a job's start more than everything done here
# ruff: noqa: PTH102, PTH103, PTH105, PTH108, PTH110, PTH114, PTH116, PTH118, PTH119, PTH123, PTH211, PTH112

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, MutableMapping

SEAL = "SHA256SUMS"
"""Checksum list written when a cache is complete. A cache without one is still being filled and gets no overlay."""

STAMP = ".overlay-of"
"""File in the overlay that names the seal it was made from."""

VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Environment variable of a cache -> its directory inside the baked cache."""


def apply(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Point the cache variables that still name baked paths to the overlay; returns its path, or None when nothing was
    changed: outside an image, cache chosen by the user, cache not sealed yet, BLACKWELL_OVERLAY=off, nothing writable.
    """
    baked = environment.get("BLACKWELL_CACHE")
    asked = environment.get("BLACKWELL_OVERLAY") or ""
    if not baked or asked == "off":
        return None
    moved = [name for name, part in VARIABLES.items() if environment.get(name) == os.path.join(baked, part)]
    if not moved:
        return None
    seal = _seal_of(baked)
    if seal is None:
        return None
    for overlay in _places(os.path.basename(os.path.normpath(baked)), asked, environment):
        if _lies_in(overlay, baked):
            continue
        new = not os.path.isdir(overlay)
        try:
            _ensure(overlay, baked, seal, private=overlay != asked)
        except OSError:  # read-only, full, or somebody else's: try the next place
            if new:  # half an overlay must not fill a small /tmp, which the job itself needs
                _remove(overlay)
            continue
        for name in moved:
            environment[name] = os.path.join(overlay, VARIABLES[name])
        return overlay
    return None


def _lies_in(overlay: str, baked: str) -> bool:
    """What is laid over the baked cache can't be a part of it."""
    inner, outer = os.path.realpath(overlay), os.path.realpath(baked)
    return inner == outer or inner.startswith(outer + os.sep)


def _remove(overlay: str) -> None:
    import shutil  # not at every start

    shutil.rmtree(overlay, ignore_errors=True)


def _seal_of(baked: str) -> str | None:
    """A text that changes whenever the baked cache is sealed again; None when it isn't sealed."""
    try:
        facts = os.stat(os.path.join(baked, SEAL))
    except OSError:
        return None
    return f"{os.path.normpath(baked)}\n{facts.st_size} {facts.st_mtime_ns}\n"


def _places(fingerprint: str, asked: str, environment: MutableMapping[str, str]) -> Iterator[str]:
    """Where an overlay may lie, best first."""
    if asked:
        yield asked
        return
    name = f"blackwell-{os.geteuid()}-{fingerprint}"
    for root in roots(environment):
        yield os.path.join(root, name)


def roots(environment: Mapping[str, str]) -> list[str]:
    """The directories in which an overlay may be made, best first, when the user asked for none."""
    found = [environment.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp"]
    if home := environment.get("HOME"):  # with every temporary directory full, root would write to the baked cache
        found.append(os.path.join(home, ".cache"))
    # A C launcher or CPU kernel that is compiled later is loaded from the overlay, which `noexec` forbids (the default
    # of `docker run --tmpfs /tmp`), so such a place comes last: reading baked entries works there all the same.
    return sorted(dict.fromkeys(found), key=_is_noexec)


def _is_noexec(directory: str) -> bool:
    try:
        return bool(os.statvfs(directory).f_flag & os.ST_NOEXEC)
    except OSError:
        return True


def _ensure(overlay: str, baked: str, seal: str, private: bool) -> None:
    """Make `overlay` show all of `baked`; nearly free when it does already. Raises OSError when it can't be used.

    Many ranks may do this at once and one may be killed half-way: every step can be repeated and succeeds when another
    process was first, the stamp comes last, and whoever finds no stamp does all steps before it uses the overlay.
    """
    os.makedirs(overlay, 0o700, exist_ok=True)
    if private:
        _check_private(overlay)
    if _is_fresh(overlay, seal):
        return
    for part in VARIABLES.values():
        source, target = os.path.join(baked, part), os.path.join(overlay, part)
        os.makedirs(target, 0o700, exist_ok=True)
        _drop_dead_links(target)  # the image changed under a kept /tmp: what was compiled stays, links are renewed
        _mirror(source, target)
    _stamp(overlay, seal)


def _check_private(overlay: str) -> None:
    """Raise PermissionError when others own or can write the directory: its name can be guessed, and shared objects are
    loaded from it.
    """
    facts = os.lstat(overlay)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise PermissionError(f"{overlay} is not a private directory of user {os.geteuid()}")


def _is_fresh(overlay: str, seal: str) -> bool:
    try:
        with open(os.path.join(overlay, STAMP)) as stamp:
            return stamp.read() == seal
    except OSError:
        return False


def _mirror(source: str, target: str) -> None:
    try:
        entries = list(os.scandir(source))
    except FileNotFoundError:
        return
    for entry in entries:
        copy = os.path.join(target, entry.name)
        try:
            if entry.is_dir():
                os.mkdir(copy, 0o700)
            elif not _is_lock(entry.name):
                os.symlink(entry.path, copy)
        except FileExistsError:
            pass
        if entry.is_dir():
            _mirror(entry.path, copy)


def _is_lock(name: str) -> bool:
    """Lock files are opened for writing, which would follow the link into the baked cache."""
    return name == "lock" or name.endswith(".lock")


def _drop_dead_links(directory: str) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            path = os.path.join(folder, name)
            if os.path.islink(path) and not os.path.exists(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _stamp(overlay: str, seal: str) -> None:
    path = os.path.join(overlay, STAMP)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as stamp:
        stamp.write(seal)
    os.replace(temporary, path)
