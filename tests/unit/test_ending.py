"""How commands end: whatever goes wrong is a sentence with a hint and a code of its own, never a traceback."""

import ast
import errno
import json
import os
import signal
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
import jinja2
import pytest
import requests

from builder import errors, flow
from builder.cli import cli, main
from builder.ending import Ended, signals_raise

ROOT = Path(__file__).resolve().parents[2]
SECRET = "hunter2"
# What runs in images (inside, layout/build) ends in its own ways.
HOST = [p for p in sorted((ROOT / "builder").rglob("*.py")) if not {"inside", "build"} & set(p.relative_to(ROOT).parts)]
# Every command, with the least that click wants of it.
COMMANDS = {name: [name] for name in cli.commands} | {
    "publish": ["publish", "--to", "oci:x"],
    "bake": ["bake", "--to", "r.example.com/x"],
    "diff": ["diff", "a", "b"],
}
RAISED: list[tuple[Exception, int]] = [
    (OSError(errno.ENOSPC, "No space left on device"), 28),
    (PermissionError(errno.EACCES, "Permission denied", "/store/x"), 28),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "/store/x"), 28),
    (json.JSONDecodeError("Expecting value", "x", 0), 29),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 29),
    (tarfile.ReadError("unexpected end of data"), 29),
    (zlib.error("incomplete"), 29),
    (docker.errors.APIError("500 Server Error"), 16),
    (requests.exceptions.ConnectionError("gone"), 16),
    (jinja2.UndefinedError("'x' is undefined"), 30),
    (errors.CommandError(("skopeo", f"https://user:{SECRET}@host/"), 1, "no"), 27),
    (errors.EngineError(f"no answer at https://{SECRET}@host/", hint="start it"), 16),
    (ZeroDivisionError("division by zero"), 1),
]


def ended(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


def break_everything(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(flow.Project, "find", fail)
    monkeypatch.setattr("builder.engine.docker.ensure", fail)


@pytest.mark.parametrize(("error", "code"), RAISED, ids=lambda x: type(x).__name__ if isinstance(x, Exception) else "")
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_whatever_is_raised_in_any_command_is_said_with_a_hint_and_a_code(
    name: str, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_everything(monkeypatch, error)
    got, out, err = ended(COMMANDS[name], capsys)
    assert (got, out) == (code, "")
    assert err.startswith("error: ") and "\nhint: " in err and "Traceback" not in err and SECRET not in err


@pytest.mark.parametrize("name", sorted(n for n, c in cli.commands.items() if any(p.name == "json_" for p in c.params)))
def test_with_json_standard_output_is_json_in_failure_too(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_everything(monkeypatch, errors.EngineError(f"no https://user:{SECRET}@host", hint="start it"))
    code, out, err = ended([*COMMANDS[name], "--json"], capsys)
    assert json.loads(out) == {"error": "no https://***@host", "hint": "start it", "exit_code": code}
    assert "no https" in err
    code, out, _ = ended([*COMMANDS[name], "--json", "--no-such-option"], capsys)
    assert json.loads(out)["exit_code"] == code == 2


def test_every_error_says_what_to_do_next() -> None:
    """Where an error is made, its hint is made too; a CommandError has one by itself."""
    names = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.BuilderError)}
    without = [
        f"{path.name}:{node.lineno}"
        for path in HOST
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in names - {"CommandError"}
        and not any(keyword.arg == "hint" for keyword in node.keywords)
    ]
    assert without == []
    assert errors.CommandError(("x",), 1, "").hint


def test_text_files_are_utf_8_whatever_the_locale() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in HOST
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") in ("read_text", "write_text")
        and not any(keyword.arg == "encoding" for keyword in node.keywords)
    ]
    assert found == []


@pytest.fixture
def as_on_a_terminal() -> Iterator[None]:
    """The default for every signal: under nohup, or in a shell's background job, some are ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_on_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_ctrl_c_does_and_only_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # while it cleans up
            cleaned.append(True)

    monkeypatch.setattr(flow.Project, "find", work)
    code, _, err = ended(["list"], capsys)
    assert code == 128 + number and cleaned == [True]
    assert "nothing half-made was kept" in err and "same command" in err
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_build_that_was_ended_keeps_the_signals_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = errors.InterruptedBuildError("interrupted; no image was made", hint="again")
    stopped.__cause__ = Ended(signal.SIGTERM)
    break_everything(monkeypatch, stopped)
    code, _, err = ended(["build", "--triton", "3.7"], capsys)
    assert code == 143 and "no image was made" in err


@pytest.mark.parametrize("words", [[","], ["12.0", " "], [", ,"]])
def test_a_capability_that_names_none_does_not_mean_all(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [part for word in words for part in ("--capability", word)]
    code, _, err = ended(["plan", "--triton", "3.7", *options], capsys)
    assert code == errors.SelectionError.exit_code and "unknown capability" in err


def test_nothing_is_cut_off_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from builder import options

    for width in (20, 80, 400):
        made = Console(width=width)
        for module in ("builder.cli.OUT", "builder.cli_publish.OUT"):
            monkeypatch.setattr(module, made)
        code, out, _ = ended(["plan", "--triton", "3.7"], capsys)
        assert code == 0 and "…" not in out
    assert "blackwell:cu130-torch2.12.1-triton3.7.1-fla0.6.0-conv1d1.7.0-py313-trixie" in out
    assert options.OUT.width >= 400 or options.OUT.is_terminal


@pytest.mark.parametrize("root", ["/nonexistent", "/dev/null"])
def test_another_directory_than_a_checkout_is_named(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUILDER_ROOT", root)
    code, _, err = ended(["list"], capsys)
    assert code == errors.FileError.exit_code and "BUILDER_ROOT" in err
