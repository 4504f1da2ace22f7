"""Lock files: read, write, check, and make from an image and a resolver. Files are opened by the caller."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from builder.errors import LockStaleError, ResolveError
from builder.layout import Layers
from builder.values import DebianPackage, Distribution, Image, Lock, checksum

FORMAT = 1
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


def loads(text: str, *, where: str) -> Lock:
    """Read a lock. Raises LockStaleError, naming the file `where`, when it is damaged, incomplete or of another format."""
    fresh = f"make it anew with `builder lock --id {where.rpartition('/')[2].removesuffix('.lock.toml')}`"
    try:
        data = tomllib.loads(text)
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
        strings = {key: str(data[key]) for key in ("name", "inputs", "platform", "base")}
        return Lock(**strings, epoch=int(data["epoch"]), debian=debian, distributions=distributions)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise LockStaleError(f"{where} is damaged: {error!r}", hint=fresh) from error


def check(lock: Lock, image: Image, layers: Layers) -> None:
    """Raise LockStaleError unless the lock was made from this image's present inputs."""
    if lock.inputs != inputs(image, layers) or lock.name != image.lock_name:
        raise LockStaleError(
            f"the lock of {image.lock_name} is stale: the matrix or the layer data has changed since it was made",
            hint=f"refresh it with `builder lock --id {image.lock_name}`",
        )


def requirements_text(distributions: Sequence[Distribution]) -> str:
    """Hashed requirements of some distributions, as pip and uv read them."""
    lines = []
    for d in sorted(distributions, key=lambda d: d.name):
        lines += [f"{d.name}=={d.version} \\\n", " \\\n".join(f"    --hash={h}" for h in d.hashes), "\n"]
    return "".join(lines)
