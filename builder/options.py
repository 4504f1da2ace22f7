"""Options that several commands share: which image is meant, how to answer, how to reach a registry."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from builder import plan
from builder.engine.process import redact
from builder.engine.skopeo import Access


class Terminal(Console):
    """rich ends the process by itself when nobody reads any more; how a command ends is decided in one place (ending.py)."""

    def on_broken_pipe(self) -> None:
        raise


# Without a terminal nothing is folded: a pipe has no width.
OUT = Terminal(width=None if sys.stdout and sys.stdout.isatty() else 400)
ERR = Terminal(stderr=True, highlight=False)
F = TypeVar("F", bound=Callable[..., Any])

AXIS_HELP = {
    "triton": "Triton, a prefix such as 3.7.",
    "torch": "torch, a prefix such as 2.12.",
    "cuda": "CUDA, a prefix such as 13.0.",
    "fla": "flash-linear-attention, a prefix.",
    "conv1d": 'causal-conv1d, a prefix, or "none".',
    "python": "Python, such as 3.13.",
    "base": "Name of a base.",
}


def say(message: str) -> None:
    """A line for a person, on stderr, without passwords."""
    ERR.print(redact(message), markup=False, soft_wrap=True)


def selection(command: F) -> F:
    """Options that say which image is meant."""
    options = [click.option(f"--{axis}", default="", metavar="VERSION", help=text) for axis, text in AXIS_HELP.items()]
    options += [
        click.option(
            "--capability",
            "capabilities",
            multiple=True,
            metavar="X.Y",
            help="Compute capability; repeatable. Default: the matrix's set.",
        ),
        click.option(
            "--platform",
            type=click.Choice(["linux/amd64", "linux/arm64"]),
            default="linux/amd64",
            show_default=True,
            help="Platform of the image.",
        ),
        click.option("--id", "id", default="", metavar="ID", help="An identifier, instead of all the above."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def as_json(command: F) -> F:
    """The --json flag."""
    decorated: F = click.option("--json", "json_", is_flag=True, help="Answer in JSON.")(command)
    return decorated


def request_of(options: dict[str, Any]) -> plan.Request:
    """The request that the selection options make up."""
    words = [c for text in options["capabilities"] for c in text.replace(",", " ").split() or [text] * bool(text)]
    return plan.Request(
        **{
            **{axis: options[axis] for axis in AXIS_HELP},
            "capabilities": tuple(words),
            "platform": options["platform"],
            "id": options["id"],
        }
    )


def registry(command: F) -> F:
    """Options that say how to reach a registry."""
    options = (
        click.option(
            "--authfile",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Credentials, in Docker's format. Default: those of `docker login` and `skopeo login`.",
        ),
        click.option(
            "--cert-dir",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help="Directory with *.crt (authorities) and *.cert, *.key (client).",
        ),
        click.option(
            "--insecure/--secure",
            default=None,
            help="Allow plain HTTP and unchecked certificates. Default: only on loopback, as Docker does.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def access_of(options: dict[str, Any]) -> Access:
    """Take the registry options out of a command's options."""
    return Access(
        authfile=options.pop("authfile"), certificates=options.pop("cert_dir"), insecure=options.pop("insecure")
    )
