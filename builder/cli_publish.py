"""Commands for what happens after a build: publish, report, diff, bake."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import click

from builder import bake, diff, flow, plan, publish, release, report
from builder.engine import contents, docker, host, scratch
from builder.engine.process import run
from builder.engine.skopeo import Access
from builder.errors import LockMissingError, SelectionError
from builder.options import OUT, access_of, as_json, registry, request_of, say, selection
from builder.show import answer, table
from builder.values import Image

F = TypeVar("F", bound=Callable[..., Any])


def identifier(command: F) -> F:
    """An identifier as an argument, in place of the selection options."""
    decorated: F = click.argument("identifier", required=False, metavar="[ID]")(command)
    return decorated


def chosen(project: flow.Project, found: str | None, options: dict[str, Any]) -> Image:
    """The image that an identifier or the selection options mean. Raises SelectionError if it is named twice."""
    if found and options["id"]:
        raise SelectionError("an identifier is given twice", hint="leave --id out")
    return flow.choose(project, request_of({**options, "id": found or options["id"]}))


@click.command("publish")
@identifier
@selection
@registry
@as_json
@click.option("--to", required=True, metavar="WHERE", help="HOST/REPO, oci:DIRECTORY or FILE.tar.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A further tag to move, such as latest; repeatable.")
@click.option(
    "--compression",
    type=click.Choice(publish.COMPRESSIONS),
    default="gzip",
    show_default=True,
    help="zstd is smaller and unpacks faster; pulling it needs Docker 23, containerd 1.5 or Podman 4.",
)
@click.option(
    "--sign-key", default="", metavar="KEY", help="Sign with cosign and this key; without it, with a CI job's identity."
)
def publish_(
    identifier: str | None, to: str, tags: tuple[str, ...], compression: str, sign_key: str, json_: bool, **options: Any
) -> None:
    """Publish a verified image with its bill of materials, provenance, verdict and warm report; then move its tags.

    Only a digest that passed `builder verify` is pushed. What is there already is not pushed again.

    Example: builder publish --triton 3.7 --to registry.example.com/ml/blackwell
    """
    project, access = flow.Project.find(), access_of(options)
    wish = release.Wish(to=to, access=access, tags=tags, compression=compression, key=sign_key)
    outcome = release.publish_image(run, project, chosen(project, identifier, options), wish, say)
    if json_:
        answer(asdict(outcome))
        return
    rows = table()
    rows.add_row("digest", outcome.digest)
    rows.add_row("image", "pushed" if outcome.pushed else "was there already")
    for tag, what in outcome.tags.items():
        rows.add_row("tag", f"{tag}: {what}")
    for name, digest in outcome.attachments.items():
        rows.add_row("attached", f"{name} {digest}")
    rows.add_row("signature", outcome.signed)
    OUT.print(rows)


@click.command("report")
@identifier
@selection
@as_json
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path), help="Directory to write to. Default: the store."
)
@click.option("--benchmark", type=click.File("rb"), help="A first_step.json of bench/first_step.py, to be shown too.")
def report_(
    identifier: str | None, output: Path | None, benchmark: BinaryIO | None, json_: bool, **options: Any
) -> None:
    """Write a page about a built image, as self-contained HTML and as Markdown: contents, needs, warm kernels, sizes, issues, tests.

    Example: builder report --triton 3.7 --output .
    """
    project = flow.Project.find()
    image = chosen(project, identifier, options)
    material = release.report_of(run, project, image, benchmark.read() if benchmark else b"", say)
    folder = output or host.store() / "reports"
    paths = {"html": folder / f"{image.id}.html", "markdown": folder / f"{image.id}.md"}
    pages = {"html": report.html(material), "markdown": report.markdown(material)}
    scratch.write_all(folder, {path.name: pages[kind] for kind, path in paths.items()})
    if json_:
        answer({kind: str(path) for kind, path in paths.items()})
        return
    for path in paths.values():
        click.echo(path)


@click.command("diff")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@registry
@as_json
@click.option("--files", type=click.IntRange(min=0), default=20, show_default=True, help="The most files to name.")
def diff_(before: str, after: str, files: int, json_: bool, **options: Any) -> None:
    """Say what changed from image A to image B: versions, packages, kernels, labels, files. Either is an identifier, a local tag
    or digest, an archive, oci:DIRECTORY or HOST/REPO:TAG.

    Example: builder diff ID blackwell.tar
    """
    access = access_of(options)
    engine = docker.ensure(run, say)
    found = []
    for word in (before, after):
        say(f"reading the contents of {word}")
        found.append(contents.resolve(run, engine, word, host.store(), access))
    difference = diff.compare(*found)
    if json_:
        answer(diff.as_dict(difference))
    else:
        click.echo(diff.markdown(difference, files=files), nl=False)


@click.command("bake")
@identifier
@selection
@click.option("--to", required=True, metavar="HOST/REPO", help="Where the baked images are pushed.")
@click.option("--cache", default="", metavar="HOST/REPO", help="Registry cache, read and written.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bake"),
    show_default=True,
    help="Directory for build contexts, answers and secrets.",
)
@click.option(
    "--compression", type=click.Choice(publish.COMPRESSIONS), default="zstd", show_default=True, help="Of layers."
)
def bake_(identifier: str | None, to: str, cache: str, output: Path, compression: str, **options: Any) -> None:
    """Print a file for `docker buildx bake`, to build locked images on remote or Kubernetes BuildKit builders.

    Its groups are baked in this order, with this command before each: fingerprint, report, image.

    Example: builder bake --triton 3.7 --to registry.example.com/ml/blackwell > bake.json && docker buildx bake -f bake.json fingerprint
    """
    project = flow.Project.find()
    if identifier or options["id"]:
        images = [chosen(project, identifier, options)]
    else:
        images = [i for i in plan.resolve_all(project.matrix(), request_of(options)) if project.lock_path(i).exists()]
    if not images:
        raise LockMissingError("none of these images has a lock", hint="make one with `builder lock`")
    wish = release.Wish(to=to, access=Access(), compression=compression)
    found = release.bake_file(run, project, images, output, wish, cache, say)
    answer(found)
    upcoming = [group for group in bake.GROUPS if group in found["group"]][-1]
    say(f"next: docker buildx bake -f FILE {upcoming}" + ("" if upcoming == "image" else ", then this command again"))


COMMANDS: tuple[click.Command, ...] = (publish_, report_, diff_, bake_)
