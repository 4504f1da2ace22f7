"""Documents are tested like code: every command has help with an example and stands in the README; the table is generated."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from builder import flow
from builder.cli import cli
from builder.show import markdown_rows

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_has_help_with_an_example_and_stands_in_the_readme(name: str) -> None:
    help_text = CliRunner().invoke(cli, [name, "--help"]).output
    assert f"Example: builder {name}" in help_text
    assert f"`builder {name}" in README


def test_every_option_is_explained() -> None:
    for command in cli.commands.values():
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, f"{command.name} {option.name}"


def test_the_readme_has_the_generated_rows() -> None:
    block = README.split("<!-- rows", 1)[1].split("-->\n", 1)[1].split("<!-- /rows -->")[0]
    assert block.strip() == markdown_rows(flow.locked_rows(flow.Project.find())).strip(), "run `make rows`"


def test_every_make_target_is_listed_and_every_variable_reaches_the_builder() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## \w", makefile, re.MULTILINE), target
    for variable in ["TRITON", "TORCH", "CUDA", "FLA", "CONV1D", "PYTHON", "BASE", "CAPABILITIES"]:
        assert f"$(if $({variable})," in makefile
        assert variable in README


def test_the_two_commands_are_in_the_readme_and_ci_calls_the_second() -> None:
    assert "make image TRITON=3.7" in README and "make test" in README
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")


def test_what_a_variable_of_make_holds_is_one_word_for_the_shell() -> None:
    """TRITON=">=3.7" unquoted would write a file; ID="*" would name the files here."""
    makefile = (ROOT / "Makefile").read_text()
    for option in re.findall(r"--[a-z0-9]+ \S*\$\([A-Z0-9_]+\)\S*", makefile):
        assert re.fullmatch(r'--[a-z0-9]+ "\$\([A-Z0-9_]+\)"\)?', option), option


def test_lock_and_render_answer_a_machine() -> None:
    locked = json.loads(CliRunner().invoke(cli, ["lock", "--check", "--triton", "3.7", "--json"]).stdout)
    assert (
        (ROOT / locked["lock"]).is_file() and locked["distributions"] > 50 and locked["checksum"].startswith("sha256:")
    )
    rendered = json.loads(CliRunner().invoke(cli, ["render", "--triton", "3.7", "--json"]).stdout)
    plain = CliRunner().invoke(cli, ["render", "--triton", "3.7"]).stdout
    assert rendered["id"] == locked["id"] and rendered["files"]["Dockerfile"] == plain
    assert {"facts/image.json", "facts/lock.toml", "facts/constraints.txt"} <= set(rendered["files"])
