"""Commands for what happens after a build: publish, report, diff, bake."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click
from rich.table import Table

from builder import flow, publish, release
from builder.engine.process import run
from builder.errors import SelectionError
from builder.options import OUT, access_of, as_json, registry, request_of, say, selection
from builder.show import answer
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
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("digest", outcome.digest)
    table.add_row("image", "pushed" if outcome.pushed else "was there already")
    for tag, what in outcome.tags.items():
        table.add_row("tag", f"{tag}: {what}")
    for name, digest in outcome.attachments.items():
        table.add_row("attached", f"{name} {digest}")
    table.add_row("signature", outcome.signed)
    OUT.print(table)


COMMANDS: tuple[click.Command, ...] = (publish_,)
