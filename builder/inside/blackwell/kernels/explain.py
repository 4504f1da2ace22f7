"""Why a kernel missed: which part of its key is not what it was when the cache was warmed."""

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blackwell import fingerprint
from blackwell.kernels import entries, sealing
from blackwell.kernels.damage import verify_cache

FORCING = {
    "TRITON_ALWAYS_COMPILE": "makes Triton compile every time",
    "TRITON_KERNEL_OVERRIDE": "makes Triton look for overridden kernels",
    "TRITON_INTERPRET": "makes Triton interpret kernels instead of compiling",
    "TRITON_CACHE_MANAGER": "replaces Triton's cache",
    "TRITON_REMOTE_CACHE_BACKEND": "replaces Triton's cache",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "switches Inductor's caches off",
}
"""Variables that are in no key, but miss all the same."""

OPTIONS = {
    "TRITON_DEBUG": "debug",
    "PTXAS_OPTIONS": "ptx_options",
    "TRITON_DEFAULT_FP_FUSION": "enable_fp_fusion",
    "TRITON_INSTRUMENTATION_MODE": "instrumentation_mode",
    "TRITON_OVERRIDE_ARCH": "arch",
}
"""Variables that come into the key as a compile option of that name."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One part of a key: its value when warmed and now. `concerns` is "triton", "inductor" or "both"."""

    part: str
    warm: str
    now: str
    concerns: str
    what_next: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """The card that the job sees; None where there is no telling (no GPU in reach)."""

    name: str | None = None
    capability: str | None = None


def present_card() -> Card:
    """Ask torch for `cuda:0`; empty without torch or GPU."""
    try:
        import torch

        if not torch.cuda.is_available():
            return Card()
        major, minor = torch.cuda.get_device_capability(0)
        return Card(name=torch.cuda.get_device_name(0), capability=f"{major}.{minor}")
    except Exception:  # a broken CUDA set-up is doctor's business
        return Card()


def differences(cache: Path, card: Card, environment: Mapping[str, str] = os.environ) -> list[Difference]:
    """Parts that concern every kernel of the cache. Raises ValueError when the cache has no keys.json."""
    keys = sealing.read_keys(cache)
    if keys is None:
        raise ValueError(
            f"{cache} has no readable {sealing.KEYS}: it was not sealed, so there is nothing to compare with"
        )
    try:
        return [d for d in _compare(cache, keys, card, environment) if d.warm != d.now]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{cache}/{sealing.KEYS} is damaged ({error!r}): warm the cache again with `blackwell warm`"
        ) from error


def _compare(cache: Path, keys: Mapping[str, Any], card: Card, environment: Mapping[str, str]) -> Iterator[Difference]:
    def part(name: str, warm: object, now: object, concerns: str, what_next: str) -> Difference:
        return Difference(part=name, warm=str(warm), now=str(now), concerns=concerns, what_next=what_next)

    capabilities = [card.capability] if card.capability else list(keys["capabilities"])
    reinstall = "install the image's versions again; the cache is valid for these alone"
    yield part("Triton version", keys["triton"], _version("triton"), "both", reinstall)
    yield part("torch version", keys["torch"], _version("torch"), "inductor", reinstall)
    now_files = sealing.triton_checksum()
    yield part(
        "Triton's own files", keys["triton_files"], now_files, "both", "some file of triton was edited or replaced"
    )
    for name, text in fingerprint.assembler_texts(capabilities, environment).items():
        warm = keys["assemblers"].get(name, "not warmed with it")
        unset = "unset TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH"
        yield part(f"assembler {name}", _release(warm), _release(text), "both", unset)
        if _release(warm) == _release(text):
            yield part(f"version text of {name}", warm.strip(), text.strip(), "both", unset)
    present = sealing.invalidating_environment()
    for name in sorted(keys["environment"].keys() | present.keys()):
        concerns = "inductor" if name in sealing.INDUCTOR_VARIABLES else "both"
        warm_value, value = keys["environment"].get(name, "(not set)"), present.get(name, "(not set)")
        verb = f"unset {name}" if warm_value == "(not set)" else f"set {name}={warm_value}"
        yield part(f"environment variable {name}", warm_value, value, concerns, verb)
    for name, effect in FORCING.items():
        value = environment.get(name, "0") or "0"
        yield part(f"environment variable {name}", "0", value, "both", f"it {effect}: unset it")
    if card.capability and card.capability not in keys["capabilities"]:
        warm_for = ", ".join(keys["capabilities"])
        yield part("GPU target", warm_for, card.capability, "both", "warm for this capability: `blackwell warm --card`")
    if card.name and keys["cards"] and card.name not in keys["cards"]:
        warm_for = ", ".join(keys["cards"])
        yield part("device name", warm_for, card.name, "inductor", "warm for this card: `blackwell warm --card`")
    yield from _places(cache, keys, environment, part)


def _places(cache: Path, keys: Mapping[str, Any], environment: Mapping[str, str], part: Any) -> Iterator[Difference]:
    """Whether the job looks where the cache is."""
    here = str(cache.resolve())
    rewrite = f"run `blackwell kernels relocate {keys['path']} {here}`"
    yield part("place of the cache", keys["path"], here, "triton", rewrite)
    for variable, directory in (("TRITON_CACHE_DIR", entries.TRITON), ("TORCHINDUCTOR_CACHE_DIR", entries.INDUCTOR)):
        value = environment.get(variable)
        if value is None:
            yield part(variable, cache / directory, "(not set)", directory, f"set it to {cache / directory}")
        elif Path(value).resolve() != (cache / directory).resolve() and not _is_overlay(Path(value), cache):
            yield part(variable, cache / directory, value, directory, "unset it; the image sets it")


def _is_overlay(directory: Path, cache: Path) -> bool:
    from blackwell.overlay import STAMP

    try:
        return (directory.parent / STAMP).read_text().startswith(f"{os.path.normpath(cache)}\n")
    except OSError:
        return False


def _version(name: str) -> str:
    try:
        return fingerprint.distribution_version(name)
    except fingerprint.FingerprintError:
        return "(not installed)"


def _release(text: str) -> str:
    """The line of an assembler's version text that names its release."""
    return next((line.strip() for line in text.splitlines() if "release" in line), text.strip())


def explain(cache: Path, kernel: str, card: Card, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that can make `kernel` miss, most telling first.

    `found` says whether the cache has entries of that name; `entries` lists what they are warm for; `reasons` are
    sentences; `differences` the parts of the key. Raises ValueError without keys.json.
    """
    keys = sealing.read_keys(cache)
    general = differences(cache, card, environment)
    warm = [k for k in entries.kernels(cache) if k.name == kernel]
    reasons = [f"{d.part} differs: warmed with {d.warm}, now {d.now}; {d.what_next}" for d in general]
    known = {value["name"] for value in (keys or {})["kernels"].values()}
    recorded = {entry for entry, value in (keys or {})["kernels"].items() if value["name"] == kernel}
    damaged = [d for d in verify_cache(cache) if d.entry in recorded | {k.entry for k in warm}]
    reasons += [f"{d.path} is {d.kind} ({d.detail}); run `blackwell kernels repair`" for d in damaged]
    reasons += [
        f"entry {entry} was warmed, but is no longer there; warm again"
        for entry in sorted(recorded)
        if not (cache / entry).is_dir() and not any(d.entry == entry for d in damaged)
    ]
    for item in warm:
        reasons += _source_reason(cache, (keys or {})["kernels"].get(item.entry), item)
        reasons += _option_reasons(cache, item, environment)
    if card.capability and warm and card.capability not in {k.capability for k in warm}:
        targets = ", ".join(sorted({k.capability for k in warm}))
        reasons.append(f"{kernel} is warm for {targets} only, the job runs on {card.capability}; warm for this card")
    if not warm and not recorded:
        near = difflib.get_close_matches(kernel, known, n=3, cutoff=0.5)
        hint = f"; near: {', '.join(near)}" if near else ""
        reasons.insert(0, f"no entry named {kernel}: no warmed workload launches it{hint}")
    if not reasons:
        reasons.append(
            "no part of the key that is the same for all launches differs: the launch itself does (argument types, "
            "divisibility by 16, equality to 1, constexpr values, num_warps, num_stages); compare with `entries`"
        )
    return {
        "kernel": kernel,
        "found": bool(warm),
        "card": card.name,
        "capability": card.capability,
        "reasons": list(dict.fromkeys(reasons)),
        "differences": [d.__dict__ for d in general],
        "entries": [k.__dict__ | {"capability": k.capability} for k in warm],
    }


def _source_reason(cache: Path, record: Mapping[str, Any] | None, kernel: entries.Kernel) -> list[str]:
    if not record or not record["file"] or not record["source"]:
        return []
    now = sealing.function_checksum(record["file"], kernel.name)
    if now is None:
        return [f"source of {kernel.name} is no longer in {record['file']}: it was moved, renamed or not installed"]
    return [] if now == record["source"] else [f"source of {kernel.name} in {record['file']} has changed since"]


def _option_reasons(cache: Path, kernel: entries.Kernel, environment: Mapping[str, str]) -> list[str]:
    metadata = entries.read_object(cache / kernel.entry / f"{kernel.name[:150]}.json")
    found = []
    for variable, option in OPTIONS.items():
        value = environment.get(variable)
        if value is None or option not in metadata:
            continue
        warm = metadata[option]
        same = (
            (value.lower() in ("1", "true", "on", "yes", "y")) == warm
            if isinstance(warm, bool)
            else value == (warm or "")
        )
        if option == "arch":
            same = value == f"{metadata['target']['arch']}" or value == warm
        if not same:
            found.append(f"{variable}={value} sets compile option {option}, warmed with {warm!r}; unset it")
    return found
