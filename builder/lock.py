"""Lock files: read, write, check, and make from an image and a resolver. Files are opened by the caller."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from builder.errors import LockStaleError, ResolveError
from builder.layout import Layers
from builder.values import DebianPackage, Distribution, Image, Lock, checksum

FORMAT = 1
LATEST = 253_402_300_800  # the year 10000: what RFC 3339 can't write any more
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!:-]*")
HEADER = "# Made by `builder lock`; not to be edited. Versions and hashes only: indexes and mirrors come from the environment.\n"


class Resolver(Protocol):
    """Resolves requirements to name -> (version, hashes)."""

    def __call__(
        self, requirements: Sequence[str], *, overrides: Sequence[str] = (), constraints: Sequence[str] = ()
    ) -> Mapping[str, tuple[str, tuple[str, ...]]]: ...


def inputs(image: Image, layers: Layers) -> str:
    """Checksum of everything that a lock is made from: the row without its capabilities, and the layer data."""
    no_pins = ("driver_floor", "conv1d", "default_for", "reason", "budget_zstd_bytes")
    stack = {k: v for k, v in asdict(image.stack).items() if k not in no_pins}
    return checksum(
        [FORMAT, asdict(image.base), stack, asdict(image.fla), image.conv1d, image.platform, asdict(layers)]
    )


def requirements(image: Image, layers: Layers) -> tuple[str, ...]:
    """What the runtime image asks the resolver for."""
    wanted = [
        f"torch=={image.stack.torch}",
        f"fla-core=={image.fla.version}",
        f"flash-linear-attention=={image.fla.version}",
    ]
    wanted += [f"transformers=={image.fla.transformers}", *layers.runtime]
    if image.conv1d != "none":
        wanted.append(f"causal-conv1d=={image.conv1d}")
    return tuple(wanted)


def make(image: Image, layers: Layers, resolve: Resolver, debian: Sequence[DebianPackage], epoch: int) -> Lock:
    """Resolve an image into a lock.

    An off-pin Triton overrides Triton alone: the same requirements are resolved without the override too, and ResolveError
    is raised when the override loses or changes any other distribution.
    """
    wanted = requirements(image, layers)
    if image.stack.override:
        runtime = resolve(wanted, overrides=(f"triton=={image.stack.triton}",))
        _check_override(image, runtime, resolve(wanted))
    else:
        runtime = resolve((*wanted, f"triton=={image.stack.triton}"))
    pins = tuple(f"{n}=={v}" for n, (v, _) in sorted(runtime.items()) if n != "triton")
    parts = [(name, pin, layers.of(name)) for name, pin in runtime.items()]
    parts += [(name, pin, "tools") for name, pin in resolve(layers.tools).items()]
    if image.conv1d != "none":
        override = (f"triton=={image.stack.triton}",) if image.stack.override else ()
        compiler = resolve((*layers.compiler, *image.stack.toolkit), constraints=pins, overrides=override)
        parts += [(name, pin, "compiler") for name, pin in compiler.items() if name not in runtime]
    distributions = tuple(
        Distribution(name=n, version=v, hashes=h, layer=layer)
        for n, (v, h), layer in sorted(parts, key=lambda p: (p[2], p[0]))
    )
    return Lock(
        name=image.lock_name,
        inputs=inputs(image, layers),
        epoch=epoch,
        platform=image.platform,
        base=image.base.reference or image.base.name,
        debian=tuple(debian),
        distributions=distributions,
    )


def _check_override(
    image: Image,
    overridden: Mapping[str, tuple[str, tuple[str, ...]]],
    pinned: Mapping[str, tuple[str, tuple[str, ...]]],
) -> None:
    changed = [
        n for n in sorted(pinned.keys() | overridden.keys()) if n != "triton" and pinned.get(n) != overridden.get(n)
    ]
    if changed:
        raise ResolveError(
            f"overriding Triton with {image.stack.triton} also changes {', '.join(changed)}; an override may change Triton alone",
            hint="this row can't be an override: choose the torch that pins this Triton",
        )


def dumps(lock: Lock) -> str:
    """Write a lock as TOML; the same lock gives the same bytes."""
    lines = [HEADER, f"version = {FORMAT}\n"]
    lines += [
        f'{key} = "{value}"\n'
        for key, value in (
            ("name", lock.name),
            ("inputs", lock.inputs),
            ("platform", lock.platform),
            ("base", lock.base),
        )
    ]
    lines += [f"epoch = {lock.epoch}\n", "debian = [\n", *(f'  "{p.name}={p.version}",\n' for p in lock.debian), "]\n"]
    for d in lock.distributions:
        lines += [f'\n[[distributions]]\nname = "{d.name}"\nversion = "{d.version}"\nlayer = "{d.layer}"\nhashes = [\n']
        lines += [*(f'  "{h}",\n' for h in d.hashes), "]\n"]
    return "".join(lines)


def loads(text: str | bytes, *, where: str) -> Lock:
    """Read a lock; bytes must be UTF-8. Raises LockStaleError, naming the file `where`, when it is damaged, incomplete or of another format."""
    fresh = f"make it anew with `builder lock --id {where.rpartition('/')[2].removesuffix('.lock.toml')}`"
    try:
        data = tomllib.loads(text if isinstance(text, str) else text.decode())
        if data["version"] != FORMAT:
            raise LockStaleError(f"{where} has lock format {data['version']}, this builder writes {FORMAT}", hint=fresh)
        debian = tuple(DebianPackage(name=n, version=v) for n, _, v in (p.partition("=") for p in data["debian"]))
        distributions = tuple(
            Distribution(name=d["name"], version=d["version"], layer=d["layer"], hashes=tuple(d["hashes"]))
            for d in data["distributions"]
        )
        unhashed = [d.name for d in distributions if not d.hashes or not all(h.startswith("sha256:") for h in d.hashes)]
        if unhashed or not distributions:
            raise LockStaleError(
                f"{where} is incomplete: no sha256 for {', '.join(unhashed) or 'any distribution'}", hint=fresh
            )
        if odd := [d.name for d in distributions if not all(map(_PLAIN.fullmatch, (d.name, d.version, *d.hashes)))]:
            raise ValueError(f"these distributions have a name, version or hash that is none: {', '.join(odd)}")
        strings = {key: str(data[key]) for key in ("name", "inputs", "platform", "base")}
        epoch = int(data["epoch"])
        if not 0 <= epoch < LATEST:
            raise ValueError(f"epoch {epoch} is no time of a lock")
        return Lock(**strings, epoch=epoch, debian=debian, distributions=distributions)
    except KeyError as error:
        raise LockStaleError(f"{where} is damaged or cut off: {error} is missing", hint=fresh) from error
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise LockStaleError(f"{where} is damaged: {error}", hint=fresh) from error


def check(lock: Lock, image: Image, layers: Layers) -> None:
    """Raise LockStaleError unless the lock was made from this image's present inputs and has all that they ask for."""
    fresh = f"refresh it with `builder lock --id {image.lock_name}`"
    if lock.inputs != inputs(image, layers) or lock.name != image.lock_name:
        raise LockStaleError(
            f"the lock of {image.lock_name} is stale: the matrix or the layer data has changed since it was made",
            hint=fresh,
        )
    if lost := _lost(lock, image, layers):
        raise LockStaleError(
            f"the lock of {image.lock_name} was edited or cut off since it was made: {'; '.join(lost)}", hint=fresh
        )


def _lost(lock: Lock, image: Image, layers: Layers) -> list[str]:
    """What a lock of this image must say and this one doesn't: the row's own pins, the platform, the base with its packages."""
    have = {(d.layer in ("tools", "compiler"), d.name): d.version for d in lock.distributions}
    asked = [(False, r) for r in (*requirements(image, layers), f"triton=={image.stack.triton}")]
    asked += [(True, r) for r in layers.tools]
    if image.conv1d != "none":
        # What the runtime image has as well stands there.
        asked += [(not any(k == (False, _name(r)) for k in have), r) for r in (*layers.compiler, *image.stack.toolkit)]
    found = [
        f"{requirement} is missing" if version is None else f"{requirement} is wanted, {version} is there"
        for extra, requirement in asked
        for version in [have.get((extra, _name(requirement)))]
        if version is None or requirement.partition("==")[2] not in ("", version)
    ]
    if lock.platform != image.platform:
        found.append(f"it is for {lock.platform}")
    if lock.base != (image.base.reference or image.base.name):
        found.append(f"its base is {lock.base}")
    if not image.base.reference and not lock.debian:
        found.append("it has no Debian packages")
    return found


def _name(requirement: str) -> str:
    """The name in a requirement, as locks spell it."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def requirements_text(distributions: Sequence[Distribution]) -> str:
    """Hashed requirements of some distributions, as pip and uv read them."""
    lines = []
    for d in sorted(distributions, key=lambda d: d.name):
        lines += [f"{d.name}=={d.version} \\\n", " \\\n".join(f"    --hash={h}" for h in d.hashes), "\n"]
    return "".join(lines)
