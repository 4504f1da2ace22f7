"""The `builder` command: plan, lock, render, build and verify pinned, prewarmed Blackwell training images."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from builder import build as building
from builder import cli_publish, flow, plan
from builder.ending import run_to_end
from builder.engine import docker, host, scratch, sizes
from builder.engine.failures import explain
from builder.engine.process import run
from builder.errors import VerifyError
from builder.options import OUT, as_json, request_of, say, selection
from builder.show import answer, describe, image_table, layer_names, layer_table, markdown_rows, table, time_table


class Commands(click.Group):
    """click's own end of a command takes every closed pipe for a success of `| head`; ours tells what failed."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise explain(error) or error from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="builder")
def cli() -> None:
    """Pinned, prewarmed training images for NVIDIA Blackwell."""


@cli.command("list")
@selection
@as_json
@click.option("--markdown", is_flag=True, help="The locked images as the README's table.")
def list_(json_: bool, markdown: bool, **options: Any) -> None:
    """List the images that the matrix allows.

    Example: builder list --triton 3.7
    """
    project = flow.Project.find()
    images = plan.resolve_all(project.matrix(), request_of(options))
    if json_:
        answer([{**describe(i), "locked": project.lock_path(i).exists()} for i in images])
        return
    if markdown:
        click.echo(markdown_rows(flow.locked_rows(project)), nl=False)
        return
    rows = table("identifier", "locked", "warnings")
    for image in images:
        rows.add_row(
            image.id, "yes" if project.lock_path(image).exists() else "no", ", ".join(r.id for r in image.warnings)
        )
    OUT.print(rows)


@cli.command("plan")
@selection
@as_json
@click.option("--tag", is_flag=True, help="Print only the local name of the image.")
def plan_(json_: bool, tag: bool, **options: Any) -> None:
    """Say which image a request means, by which defaults, and which rules spoke.

    Example: builder plan --triton 3.7 --json
    """
    image = flow.choose(flow.Project.find(), request_of(options))
    if tag:
        click.echo(image.tag)
        return
    if json_:
        answer({**describe(image), "defaults": list(image.defaults_used)})
        return
    OUT.print(image_table(image))
    for reason in image.defaults_used:
        OUT.print(f"chosen: {reason}", markup=False, soft_wrap=True)
    for rule in image.rules:
        OUT.print(f"{rule.verdict}: {rule.sentence} {rule.instead} ({rule.url})", markup=False, soft_wrap=True)


@cli.command("lock")
@selection
@click.option("--check", is_flag=True, help="Only say whether the lock is there and fresh.")
@as_json
def lock_(check: bool, json_: bool, **options: Any) -> None:
    """Resolve an image and write its lock: every distribution and Debian package, with versions and hashes.

    Example: builder lock --triton 3.7
    """
    project = flow.Project.find()
    image = flow.choose(project, request_of(options))
    made = flow.read_lock(project, image) if check else flow.make_lock(run, project, image, say)
    path = project.lock_path(image).relative_to(project.root)
    if json_:
        counts = {"distributions": len(made.distributions), "debian": len(made.debian)}
        answer({**describe(image), "lock": str(path), "checksum": made.checksum, **counts})
        return
    click.echo(f"{path}: {len(made.distributions)} distributions, {len(made.debian)} Debian packages")


@cli.command("render")
@selection
@click.option(
    "--output",
    type=click.Path(file_okay=False),
    help="Write all rendered files here, instead of printing the Dockerfile.",
)
@as_json
def render_(output: str | None, json_: bool, **options: Any) -> None:
    """Render an image's Dockerfile from its lock.

    Example: builder render --triton 3.7 > Dockerfile
    """
    project = flow.Project.find()
    image = flow.choose(project, request_of(options))
    locked = flow.read_lock(project, image)
    files = flow.render_context(project, image, locked)
    if output is not None:
        scratch.write_all(Path(output), files)
        say(f"wrote the rendered files to {output}")
    if json_:
        answer({**describe(image), "files": dict(files)})
    elif output is None:
        click.echo(files["Dockerfile"], nl=False)


@cli.command("build")
@selection
@as_json
def build_(json_: bool, **options: Any) -> None:
    """Build an image from its lock; ends at once when nothing has changed.

    Example: builder build --triton 3.7 --capability 12.0
    """
    project = flow.Project.find()
    image = flow.choose(project, request_of(options))
    for rule in image.warnings:
        say(f"warning: {rule.sentence} ({rule.url})")
    result = flow.build_image(run, project, image, say)
    engine = docker.ensure(run, say)
    layers = sizes.measure(engine, image.tag, host.store())
    compressed = sum(layer.compressed["zstd"] for layer in layers)
    building.check_budget(image, compressed, project.matrix().budget)
    if json_:
        answer(
            {
                **describe(image),
                "digest": result.digest,
                "built": result.built,
                "seconds": dict(result.seconds),
                "size": sum(layer.size for layer in layers),
                "size_zstd": compressed,
            }
        )
        return
    OUT.print(image_table(image))
    OUT.print(layer_table(layers, layer_names(layers, flow.read_lock(project, image))))
    OUT.print(time_table(result.seconds) if result.built else "unchanged: nothing was built")
    OUT.print(f"run it: docker run --rm -it --gpus all {image.tag}", markup=False, soft_wrap=True)


@cli.command("verify")
@selection
@as_json
def verify_(json_: bool, **options: Any) -> None:
    """Run the image's tests in it, and keep the verdict for its digest.

    Example: builder verify --triton 3.7 --capability 12.0
    """
    project = flow.Project.find()
    verdict = flow.verify_image(run, project, flow.choose(project, request_of(options)), say)
    if json_:
        answer(json.loads(verdict.dumps()))
    else:
        OUT.print(
            f"{verdict.id} {verdict.digest}: " + ", ".join(f"{n} {o}" for o, n in verdict.counts().items()),
            markup=False,
            soft_wrap=True,
        )
    if not verdict.passed:
        failed = [t.name for t in verdict.tests if t.outcome == "failed"]
        raise VerifyError(
            f"{verdict.id} failed {len(failed)} of its tests: {', '.join(failed[:10])}"
            if failed
            else f"none of the tests of {verdict.id} ran",
            hint="see why above, mend the image and build it anew",
        )


@cli.command("engine")
@click.option("--empty-store", is_flag=True, help="Remove stored wheels, root file systems, sizes and logs.")
@as_json
def engine_(empty_store: bool, json_: bool) -> None:
    """Find, or install and start, a Docker Engine; say what builds can use, and where they keep things.

    Example: builder engine
    """
    if empty_store:
        freed = host.empty_store()
        if json_:
            answer({"store": str(host.store()), "freed": freed})
        else:
            click.echo(f"{host.store()}: freed {freed / 1e6:,.0f} MB")
        return
    engine = docker.ensure(run, say)
    found = host.resources(engine.root)
    facts: dict[str, Any] = {
        "version": engine.version,
        "client": str(engine.client),
        "platform": engine.platform,
        "root": str(engine.root),
        "free_disk": found.disk,
        "memory": found.memory,
        "cores": found.cores,
        "compile_jobs": found.jobs,
        "store": str(host.store()),
    }
    if json_:
        answer(facts)
        return
    rows = table()
    for key, value in facts.items():
        rows.add_row(key.replace("_", " "), f"{value / 1e9:,.1f} GB" if key in ("free_disk", "memory") else str(value))
    OUT.print(rows)


for command in cli_publish.COMMANDS:
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: an error becomes its sentence, its hint and its exit code."""
    sys.exit(run_to_end(cli.main, sys.argv[1:] if argv is None else argv))
