"""Which keys the matrix files have, and how each value is checked. matrices/schema.json says the same to editors."""

from typing import Any, get_args

from builder import checks
from builder.checks import Check
from builder.values import Platform, Verdict

_NAME = checks.matching(r"[a-z0-9][a-z0-9.-]{0,39}", "a name of at most 40 small letters, digits, dots and dashes")
_DIGEST = checks.matching(
    r"[A-Za-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}", "an image by digest, repository@sha256:<64 hex digits>"
)
_PLATFORM = checks.one_of(get_args(Platform))
CONDITIONS: dict[str, Check] = {
    **dict.fromkeys(("cuda", "torch", "triton", "fla", "conv1d", "transformers", "python"), checks.specifier),
    "base": checks.text,
    "platform": _PLATFORM,
    "override": checks.boolean,
}


def _table(required: dict[str, Check], optional: dict[str, Check]) -> Check:
    """A table within a row; not an empty one."""

    def check(value: Any) -> str:
        wrong = "\n".join(f".{problem}" for problem in checks.table("", value, required, optional))
        return wrong if wrong or value else "must name at least one axis"

    return check


# Arrays of tables: required keys, optional keys.
ROWS: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
    "bases": (
        {"name": _NAME, "python": checks.matching(r"3\.[0-9]+", "a Python such as 3.13")},
        {
            "suite": _NAME,
            "reference": _DIGEST,
            "components": checks.listing(_NAME),
            "packages": checks.listing(checks.matching(r"[a-z0-9][a-z0-9.+-]+", "a Debian package")),
        },
    ),
    "stacks": (
        {
            "cuda": checks.matching(r"[0-9]+\.[0-9]+", "a CUDA release as major.minor"),
            "torch": checks.version,
            "triton": checks.version,
            "driver_floor": checks.matching(r"[0-9]+(\.[0-9]+)+", "an NVIDIA driver version"),
        },
        {
            "triton_pin": checks.version,
            "reason": checks.text,
            "toolkit": checks.listing(
                checks.matching(r"[a-z0-9-]+==[0-9][0-9a-z.]*", "a pinned distribution, name==version")
            ),
            "devel_image": _DIGEST,
            "conv1d": checks.one_of(["none"]),
            "default_for": checks.listing(checks.one_of(["cuda", "torch", "triton"])),
            "budget_zstd_bytes": checks.size,
        },
    ),
    "fla": ({"version": checks.version, "transformers": checks.version}, {}),
    "conv1d": ({"version": checks.version}, {}),
    "excludes": ({"when": _table({}, CONDITIONS), "reason": checks.text}, {}),
    "rules": (
        {
            "id": _NAME,
            "when": _table({}, {**CONDITIONS, "capabilities": checks.listing(checks.capability)}),
            "verdict": checks.one_of(get_args(Verdict)),
            "sentence": checks.text,
            "url": checks.matching(r"https://\S+", "an https address"),
            "instead": checks.text,
        },
        {},
    ),
}
# What makes a row the same as another.
IDENTITY = {
    "bases": ("name",),
    "stacks": ("cuda", "torch", "triton", "conv1d"),
    "fla": ("version",),
    "conv1d": ("version",),
    "excludes": ("when",),
    "rules": ("id",),
}
DEFAULTS: dict[str, Check] = {
    "base": checks.text,
    "fla": checks.version,
    "conv1d": checks.version,
    "capabilities": checks.listing(checks.capability),
}
SETTINGS: dict[str, Check] = {
    "capabilities": checks.listing(checks.capability),
    "platforms": checks.listing(_PLATFORM),
    "budget_zstd_bytes": checks.size,
    "defaults": _table(DEFAULTS, {}),
}
