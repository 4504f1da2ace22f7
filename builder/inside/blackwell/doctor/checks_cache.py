"""Checks of the kernel caches: is the baked one this image's and whole, is it used, and where do misses go."""

import importlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from blackwell import overlay
from blackwell.doctor.finding import Finding, Seen, failed, passed, skipped, warned

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "9p", "afs", "pvfs2"}
    | {"orangefs", "wekafs", "ocfs2", "gfs2", "virtiofs", "coda"}
)
"""File system types that machines share, as /proc/self/mountinfo spells them; for `fuse.NAME` see LOCAL_FUSE."""

LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll", "fuse.lxcfs", "fuse.gvfsd-fuse", "fuseblk"}
)
"""FUSE file systems of this machine; every other one is taken for remote storage (sshfs, s3fs, gcsfuse...)."""

NEEDED = 256 << 20
"""Free bytes below which the place for new kernels is called full."""


def cache_used(seen: Seen) -> Finding:
    """Whether Triton and Inductor look into the baked cache at all."""
    baked = seen.environment.get("BLACKWELL_CACHE")
    if not baked:
        return warned(
            "BLACKWELL_CACHE is not set: no baked kernel cache is used", "start from the image's own environment"
        )
    problems = []
    for name, part in overlay.VARIABLES.items():
        value = seen.environment.get(name)
        if value is None:
            problems.append(f"{name} is not set")
        elif not _serves(value, os.path.join(baked, part)):
            problems.append(f"{name}={value} is not the baked {os.path.join(baked, part)}")
    if problems:
        return warned(
            f"{'; '.join(problems)}: nothing baked is found there",
            "unset it (the image's value is right), or expect the first step to compile",
        )
    return passed(f"both caches read {baked}")


def _serves(path: str, baked: str) -> bool:
    """Whether a cache directory is the baked one or the overlay over it (whose stamp names what it was made from)."""
    if os.path.normpath(path) == os.path.normpath(baked):
        return True
    try:
        stamp = (Path(path).parent / ".overlay-of").read_text()
    except OSError:
        return False
    return stamp.splitlines()[:1] == [os.path.normpath(os.path.dirname(baked))]


def fingerprint(seen: Seen) -> Finding:
    """The baked cache's name against the fingerprint of what is installed now."""
    baked = seen.environment.get("BLACKWELL_CACHE")
    if not baked or not os.path.isdir(baked):
        return skipped(f"no baked cache ({baked or 'BLACKWELL_CACHE is not set'})")
    capabilities = (seen.facts or {}).get("capabilities")
    if not capabilities:
        return skipped("the image names no capabilities")
    from blackwell.fingerprint import FingerprintError, collect

    name = Path(os.path.realpath(baked)).name  # a copy elsewhere may be called anything, its keys.json says what it is
    keys = importlib.import_module("blackwell.kernels.sealing").read_keys(Path(baked)) or {}
    name = str(keys.get("fingerprint", name))
    try:
        expected = collect(capabilities, seen.environment).digest()
    except FingerprintError as problem:
        return failed(f"the fingerprint can't be computed: {problem}", "see the checks of torch and Triton")
    if name != expected:
        return failed(
            f"the cache was made for {name}, what is installed is {expected}: its kernels miss",
            "put the locked Triton and torch back (check `distributions`), or warm again with `blackwell warm`",
        )
    return passed(name)


def integrity(seen: Seen) -> Finding:
    """Every kind of damage in the baked cache."""
    baked = seen.environment.get("BLACKWELL_CACHE")
    if not baked or not os.path.isdir(baked):
        return skipped(f"no baked cache ({baked or 'BLACKWELL_CACHE is not set'})")
    if importlib.util.find_spec("blackwell.kernels") is None:
        return skipped("blackwell.kernels is not installed beside this doctor")
    damage = list(importlib.import_module("blackwell.kernels").verify_cache(Path(baked)))
    first = "; ".join(f"{item.path} is {item.kind} ({item.detail}), which {item.effect}" for item in damage[:3])
    advice = "`blackwell kernels repair` removes just the damaged entries"
    if any(item.effect != "harmless" for item in damage):
        return failed(f"{len(damage)} damaged: {first}", advice)
    if damage:
        return warned(f"{len(damage)} leftovers, harmless: {first}", advice)
    return passed(f"{baked} is whole")


def writable(seen: Seen) -> Finding:
    """Where a kernel that isn't warm would be written, tried with a real file."""
    baked = seen.environment.get("BLACKWELL_CACHE")
    for place in _places(seen.environment, baked):
        try:
            with tempfile.NamedTemporaryFile(dir=_existing(place), prefix=".blackwell-doctor-"):
                pass
        except OSError:
            continue
        room = os.statvfs(_existing(place))
        free = room.f_bavail * room.f_frsize
        if free < NEEDED:
            return warned(
                f"{place} has only {free >> 20} MiB left for new kernels",
                "free some, or set BLACKWELL_OVERLAY to a roomier place",
            )
        if room.f_flag & os.ST_NOEXEC:
            return warned(
                f"{place} is mounted noexec: a launcher compiled there can't be loaded",
                "add exec to the mount (--tmpfs /tmp:exec), or set BLACKWELL_OVERLAY to another place",
            )
        return passed(f"new kernels go to {place}, {free >> 30} GiB free")
    return warned(
        "no place for new kernels is writable: warm ones work, a miss raises PermissionError",
        "add --tmpfs /tmp:exec, or set BLACKWELL_OVERLAY to a writable directory",
    )


def _places(environment: Mapping[str, str], baked: str | None) -> list[str]:
    """What the start-up hook will use, best first: the caller's own directory, else the overlay's places."""
    own = environment.get("TRITON_CACHE_DIR")
    if own and not (baked and os.path.normpath(own).startswith(os.path.normpath(baked) + os.sep)):
        return [own]
    asked = environment.get("BLACKWELL_OVERLAY")
    if asked and asked != "off":
        return [asked]
    if asked == "off" or environment.get("BLACKWELL_STARTUP") == "0":
        return [own] if own else []
    return overlay.roots(environment)


def _existing(path: str) -> str:
    """The path itself, or its nearest parent that exists: a cache directory is made on first use."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def network_storage(seen: Seen) -> Finding:
    """Cache directories on a file system that other machines share, judged from the mount table.

    The path itself (it may be a link) is followed only when its spelling is local: that blocks when a server is gone.
    """
    with open("/proc/self/mountinfo") as file:
        mounts = parse_mounts(file.read())
    shared = []
    for name in (*overlay.VARIABLES, "BLACKWELL_OVERLAY"):
        value = seen.environment.get(name)
        if not value or not os.path.isabs(value):
            continue
        point, kind = mount_of(value, mounts)
        if not is_network(kind):
            point, kind = mount_of(os.path.realpath(value), mounts)
        if is_network(kind):
            shared.append(f"{name}={value} lies on {kind} ({point})")
    if shared:
        return warned(
            f"{'; '.join(shared)}: many ranks and machines would write one cache over the network",
            "unset it: the baked cache is local and new kernels go to /tmp; or name a local directory",
        )
    return passed("the caches lie on local file systems")


def parse_mounts(text: str) -> dict[str, str]:
    """/proc/self/mountinfo -> mount point -> file system type; a later mount on one point hides the earlier."""
    mounts = {}
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if separator and len(fields) > 4:
            point = fields[4].encode().decode("unicode_escape")  # spaces are written \040
            mounts[point] = after.split()[0]
    return mounts


def mount_of(path: str, mounts: Mapping[str, str]) -> tuple[str, str]:
    """The mount point over `path` and its type, by the longest fitting prefix; ("", "") for an empty table."""
    path = os.path.normpath(path)
    fitting = [point for point in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    point = max(fitting, key=len, default="")
    return point, mounts.get(point, "")


def is_network(kind: str) -> bool:
    """Whether a file system type is shared between machines."""
    return kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE and kind != "fusectl")
