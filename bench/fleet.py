"""What many images cost, given the layers that they share: in a registry, on a disk of Docker, and in build time.

    python bench/fleet.py --id <identifier> --count 100

Sizes are those of a built image, measured layer by layer (the store keeps them). How often a layer is stored follows from what it
is made from: a registry keeps equal layers once, wherever they lie in an image; Docker's overlay2 keeps them once for each different
stack of layers below. Layers of other versions are taken to be as large as the measured ones: that is the one assumption here.
Times are those of that image's build, read from its log, multiplied by how often each stage differs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from builder import build, flow, plan, show
from builder.engine import docker, host, sizes
from builder.engine.process import run
from builder.values import Capability, Image

Key = tuple[str, ...]


def caps(image: Image) -> str:
    """Capabilities as text."""
    return ",".join(str(c) for c in image.capabilities)


# What a layer is made from: images that agree in it have the same layer.
MADE_FROM: dict[str, Callable[[Image], Key]] = {
    "base": lambda i: (i.base.name, i.platform),
    "virtual environment": lambda i: (i.base.name, i.platform),
    "cuda": lambda i: (i.stack.cuda, i.base.python, i.platform),
    "cudnn": lambda i: (i.stack.torch, i.base.python, i.platform),
    "triton": lambda i: (i.stack.triton, i.base.python, i.platform),
    "torch": lambda i: (i.stack.torch, i.stack.cuda, i.base.python, i.platform),
    "extensions": lambda i: (
        i.conv1d,
        i.stack.torch,
        i.base.name,
        ",".join(sorted({str(c.major) for c in i.capabilities})),
    ),
    "python": lambda i: (i.fla.transformers, i.base.python, i.platform),
    "fla": lambda i: (i.fla.version, i.base.python),
    "null GPU": lambda i: (i.stack.torch, i.base.name),
    "blackwell command": lambda i: (),
    "entrypoint": lambda i: (),
}
# Build stages by the layers that they make; a stage runs once for each different input, which includes everything below it.
STAGES: dict[str, Callable[[Image], Key]] = {
    "base": MADE_FROM["base"],
    "libraries": lambda i: (i.stack.torch, i.stack.triton, i.base.name, i.platform),
    "extensions-compile": MADE_FROM["extensions"],
    "nullgpu": lambda i: (i.stack.torch, i.stack.triton, i.base.name, i.platform),
    "runtime": lambda i: (i.lock_name, MADE_FROM["extensions"](i)[3]),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes and seconds for some images: as if nothing were shared, in a registry (zstd), and on a Docker disk."""

    images: int
    apart: int
    registry: int
    disk_apart: int
    disk: int
    seconds_apart: float
    seconds: float


def fleet(matrix_images: Sequence[Image], all_capabilities: Sequence[Capability]) -> Iterator[Image]:
    """Images of a fleet: every image of the matrix, then the same for fewer capabilities."""
    yield from matrix_images
    for size in range(len(all_capabilities) - 1, 0, -1):
        for some in combinations(all_capabilities, size):
            for image in matrix_images:
                if image.capabilities != some:
                    yield replace(image, capabilities=some, default_capabilities=False)


def cost(images: Sequence[Image], layers: Sequence[tuple[str, int, int]], seconds: dict[str, float]) -> Cost:
    """What the images cost. layers: (name, bytes, bytes with zstd), lowest first. seconds: by build stage, for one image."""
    stored: dict[Key, int] = {}
    on_disk: dict[tuple[Key, ...], int] = {}
    worked: dict[Key, float] = {}
    apart = disk_apart = 0
    seconds_apart = 0.0
    for image in images:
        chain: tuple[Key, ...] = ()
        for name, size, compressed in layers:
            if name == "extensions" and image.conv1d == "none":
                continue
            made_from = MADE_FROM.get(name, lambda i: (i.id,))(image)
            chain = (*chain, (name, *made_from))
            stored[chain[-1]] = compressed
            on_disk[chain] = size
            apart, disk_apart = apart + compressed, disk_apart + size
        for stage, spent in seconds.items():
            if stage.startswith("extensions") and image.conv1d == "none":
                continue
            worked[(stage, *STAGES.get(stage, lambda i: (i.id,))(image))] = spent
            seconds_apart += spent
    return Cost(
        images=len(images), apart=apart, registry=sum(stored.values()), disk_apart=disk_apart, disk=sum(on_disk.values()),
        seconds_apart=seconds_apart, seconds=sum(worked.values()),
    )  # fmt: skip


def measured_seconds(log: str) -> dict[str, float]:
    """Seconds by stage from the log of a build."""
    progress = build.Progress(say=lambda _message: None)
    for line in log.splitlines():
        progress.line(line)
    return progress.seconds


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", required=True, help="identifier of a built image, whose layers are measured")
    parser.add_argument("--count", type=int, default=100, help="images (default: 100)")
    parser.add_argument(
        "--compile-log",
        metavar="ID",
        help="another build's log, for the stage that compiles, where this one took it from the store",
    )
    args = parser.parse_args()
    project = flow.Project.find()
    matrix = project.matrix()
    image = flow.choose(project, plan.Request(id=args.id))
    measured = sizes.measure(docker.ensure(run, print), image.tag, host.store())
    names = show.layer_names(measured, flow.read_lock(project, image))
    layers = [(name, layer.size, layer.compressed["zstd"]) for name, layer in zip(names, measured, strict=True)]
    seconds = measured_seconds(project.log_path(image).read_text())
    if args.compile_log:
        other = flow.choose(project, plan.Request(id=args.compile_log))
        seconds["extensions-compile"] = measured_seconds(project.log_path(other).read_text())["extensions-compile"]
    everything = list(fleet(plan.resolve_all(matrix, plan.Request()), matrix.capabilities))
    if len(everything) < args.count:
        print(f"the matrix gives {len(everything)} images, not {args.count}", file=sys.stderr)
        return 1
    print(f"Measured: {image.id}\n")
    print(
        "| images | registry, unshared | registry, shared | Docker disk, unshared | Docker disk, shared | build, unshared | build, shared |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for count in sorted({1, 2, 10, args.count}):
        c = cost(everything[:count], layers, seconds)
        print(
            f"| {c.images} | {c.apart / 1e9:.1f} GB | {c.registry / 1e9:.1f} GB | {c.disk_apart / 1e9:.1f} GB | {c.disk / 1e9:.1f} GB "
            f"| {c.seconds_apart / 3600:.1f} h | {c.seconds / 3600:.1f} h |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
