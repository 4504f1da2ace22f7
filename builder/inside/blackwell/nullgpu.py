"""Run a program under the null GPU: an unmodified CUDA torch sees one named card whose kernels do nothing (builder/inside/nullgpu/README.md).

On only in the environment of a child that `command` or `environment` made it for; results computed there are garbage.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blackwell import paths

SWITCH = ("NULLGPU_ON", "results-are-garbage")  # the library ends a process that preloads it without this
MAX_DEVICES = 16
# Order matters: each library links to the ones before it.
LIBRARIES = ("libcuda.so", "libcudart.so", "libcublasLt.so", "libcublas.so", "libcudnn.so", "libnccl.so")
CAPABILITY_MAJOR, CAPABILITY_MINOR = "compute_capability_major", "compute_capability_minor"
HOOK = Path(__file__).with_name("nullgpu_hook")


class NullGpuError(Exception):
    """Why the null GPU can't be started, and what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card model as the NVIDIA driver describes it."""

    name: str  # exactly as the NVIDIA driver reports it
    memory: int  # bytes that the NVIDIA driver reports as total
    driver: int  # CUDA version of the NVIDIA driver, e.g. 13000
    measured: bool  # read off a real card in one go, not put together from tables
    source: str  # where the values are from
    attributes: Mapping[str, int] = field(repr=False)  # by CUdevice_attribute's name, lower case
    inherited: Mapping[str, int] = field(
        default_factory=dict, repr=False
    )  # no source for this card: taken from a measured one

    @property
    def capability(self) -> str:
        """Compute capability, e.g. "12.0"."""
        return f"{self.attributes[CAPABILITY_MAJOR]}.{self.attributes[CAPABILITY_MINOR]}"

    def encoded(self) -> str:
        """The card as NULLGPU_CARD carries it to the C libraries; attributes by number."""
        numbers = attribute_numbers()
        values = {**self.inherited, **self.attributes}
        pairs = sorted((numbers[name], value) for name, value in values.items())
        return ";".join(
            [f"name={self.name}", f"memory={self.memory}", f"driver={self.driver}", *(f"{n}={v}" for n, v in pairs)]
        )


def attribute_numbers() -> dict[str, int]:
    """CUdevice_attribute: lower-case name without prefix to number (cards/attributes.txt)."""
    lines = (paths.data("cards") / "attributes.txt").read_text().splitlines()
    return {name: int(number) for number, name in (line.split() for line in lines if line and not line.startswith("#"))}


def card_from_dict(content: Mapping[str, Any], origin: str) -> Card:
    """A card from parsed TOML; raises NullGpuError that names `origin` and what is wrong in it."""
    known = attribute_numbers()
    for table in ("attributes", "inherited"):
        values = content.get(table, {})
        if not isinstance(values, Mapping) or not all(type(value) is int for value in values.values()):
            raise NullGpuError(f"card profile {origin}: {table} must be a table of whole numbers")
    attributes, inherited = dict(content.get("attributes", {})), dict(content.get("inherited", {}))
    wrong = [f"{key} is missing" for key in ("name", "memory", "driver", "measured", "source") if key not in content]
    wrong += [f"attributes.{key} is missing" for key in (CAPABILITY_MAJOR, CAPABILITY_MINOR) if key not in attributes]
    wrong += [
        f"{key} is no device attribute (cards/attributes.txt)" for key in [*attributes, *inherited] if key not in known
    ]
    wrong += [f"{key} is given twice" for key in attributes if key in inherited]
    if wrong:
        raise NullGpuError(f"card profile {origin}: " + "; ".join(wrong))
    fields = {key: content[key] for key in ("name", "memory", "driver", "measured", "source")}
    return Card(**fields, attributes=attributes, inherited=inherited)


def cards() -> dict[str, Card]:
    """Every card with a profile, by the NVIDIA driver's name: those shipped, then measured ones of BLACKWELL_CARDS (a directory), which win."""
    directories = [paths.data("cards")]
    if os.environ.get("BLACKWELL_CARDS"):
        directories.append(Path(os.environ["BLACKWELL_CARDS"]))
    found: dict[str, Card] = {}
    for path in (path for directory in directories for path in sorted(directory.glob("*.toml"))):
        try:
            content = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise NullGpuError(f"card profile {path} can't be read: {error}") from error
        card = card_from_dict(content, str(path))
        found[card.name] = card
    return found


def card_named(name: str) -> Card:
    """The card of that exact name; raises NullGpuError with the near ones."""
    known = cards()
    if name not in known:
        near = [other for other in known if name.lower() in other.lower()]
        hint = (
            f"did you mean {' or '.join(repr(n) for n in near)}?"
            if near
            else f"known: {', '.join(repr(n) for n in known)}."
        )
        raise NullGpuError(
            f"no card profile is named {name!r} exactly as the NVIDIA driver reports it; {hint} `blackwell doctor --profile` writes one."
        )
    return known[name]


def is_on() -> bool:
    """Does this process run under the null GPU?"""
    return os.environ.get(SWITCH[0]) == SWITCH[1]


def driver_visible() -> bool:
    """Is a real NVIDIA driver to be seen here?"""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/proc/driver/nvidia/version"))


def library_files(directory: Path) -> list[Path]:
    """The built libraries in preload order; raises NullGpuError for any that is missing."""
    found = []
    for stem in LIBRARIES:
        match = [path for path in directory.glob(f"{stem}.*") if re.fullmatch(r"\d+", path.name.rpartition(".")[2])]
        if len(match) != 1:
            raise NullGpuError(
                f"{directory} holds {len(match)} {stem}.N, wanted one; build them with nullgpu/build.py, or set BLACKWELL_NULLGPU_LIB"
            )
        found.append(match[0])
    return found


def environment(card: str, count: int = 1, *, beside_driver: bool = False) -> dict[str, str]:
    """The variables to add to a child's environment so that it sees `count` (1 to 16) null devices of the named card.

    LD_PRELOAD and PYTHONPATH are put in front of what this process has. Raises NullGpuError for an unknown card, missing libraries, or a
    visible NVIDIA driver unless `beside_driver` or BLACKWELL_NULLGPU_BESIDE_DRIVER=1 says that is meant.
    """
    profile = card_named(card)
    if not 1 <= count <= MAX_DEVICES:
        raise NullGpuError(f"{count} devices asked for; the null GPU has 1 to {MAX_DEVICES}")
    beside_driver = beside_driver or os.environ.get("BLACKWELL_NULLGPU_BESIDE_DRIVER") == "1"
    if driver_visible() and not beside_driver:
        raise NullGpuError(
            "a real NVIDIA driver is visible here, and null GPU results could be taken for real ones; "
            "run without it, or set BLACKWELL_NULLGPU_BESIDE_DRIVER=1"
        )
    directory = paths.nullgpu_lib().resolve()
    preload = [str(path) for path in library_files(directory)]
    variables = {
        SWITCH[0]: SWITCH[1],
        "NULLGPU_CARD": profile.encoded(),
        "NULLGPU_COUNT": str(count),
        "LD_PRELOAD": ":".join([*preload, *filter(None, [os.environ.get("LD_PRELOAD")])]),
        # Triton links its launchers against the libcuda.so.1 of this directory.
        "TRITON_LIBCUDA_PATH": str(directory),
        # Its sitecustomize.py loads integer_truth once torch is imported; a script needs no change.
        "PYTHONPATH": os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if beside_driver:
        variables["BLACKWELL_NULLGPU_BESIDE_DRIVER"] = "1"
    return variables


def announce(card: str, count: int = 1) -> None:
    """Say in one line on stderr that the null GPU is on. Raises NullGpuError for an unknown card."""
    profile = card_named(card)
    several = f"{count} x " if count > 1 else ""
    print(
        f"null GPU: {several}{profile.name} ({profile.capability}), no kernel runs, results are garbage",
        file=sys.stderr,
        flush=True,
    )


def command(
    argv: Sequence[str], card: str, count: int = 1, *, beside_driver: bool = False
) -> tuple[list[str], dict[str, str]]:
    """(argv, whole environment) of a child under the null GPU; says in one line on stderr that it is on. Raises like `environment`."""
    extra = environment(card, count, beside_driver=beside_driver)
    announce(card, count)
    return list(argv), {**os.environ, **extra}


def run(
    argv: Sequence[str], card: str, count: int = 1, *, beside_driver: bool = False, timeout: float | None = None
) -> int:
    """Run a program under the null GPU and return its exit code. Raises NullGpuError, or subprocess.TimeoutExpired after `timeout` seconds."""
    words, variables = command(argv, card, count, beside_driver=beside_driver)
    return subprocess.run(words, env=variables, check=False, timeout=timeout).returncode


# ---- writing a measured profile on a real card ----


@contextlib.contextmanager
def _driver() -> Iterator[ctypes.CDLL]:
    if is_on():
        raise NullGpuError("a profile can't be measured under the null GPU; run this on the real card without it")
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NullGpuError(
            f"no NVIDIA driver here ({error}); a profile is measured on a machine with the card"
        ) from error
    if status := library.cuInit(0):
        raise NullGpuError(
            f"the NVIDIA driver does not start (cuInit returned {status}); `blackwell doctor` looks further"
        )
    yield library


def dump_profile(device: int = 0, note: str = "") -> dict[str, Any]:
    """The profile of a real card as a dict of the card files' form, read off the NVIDIA driver. Raises NullGpuError without a card.

    `note` is added to the source text, e.g. the host or the driver's version.
    """
    with _driver() as library:
        name, memory, version = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
        if library.cuDeviceGetName(name, len(name), device):
            raise NullGpuError(f"there is no device {device} here")
        library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        library.cuDriverGetVersion(ctypes.byref(version))
        attributes = {}
        for key, number in attribute_numbers().items():
            value = ctypes.c_int()
            if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
                attributes[key] = value.value
    source = "read off the card by blackwell.nullgpu.dump_profile" + (f"; {note}" if note else "")
    return {
        "name": name.value.decode(),
        "memory": memory.value,
        "driver": version.value,
        "measured": True,
        "source": source,
        "attributes": attributes,
    }


def profile_toml(profile: Mapping[str, Any]) -> str:
    """`dump_profile`'s dict as the text of a card file."""
    quoted = {
        key: '"' + str(profile[key]).replace("\\", "\\\\").replace('"', '\\"') + '"' for key in ("name", "source")
    }
    lines = [f"name = {quoted['name']}", f"memory = {profile['memory']}", f"driver = {profile['driver']}"]
    lines += [f"measured = {str(profile['measured']).lower()}", f"source = {quoted['source']}"]
    for table in ("attributes", "inherited"):
        if profile.get(table):
            lines += ["", f"[{table}]", *(f"{key} = {value}" for key, value in profile[table].items())]
    return "\n".join(lines) + "\n"
