"""How a command ends: every error becomes its sentence, its hint and its exit code; signals end it as Ctrl-C does."""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import click

from builder.engine.failures import explain
from builder.engine.process import redact
from builder.errors import InterruptedBuildError, OutputClosedError
from builder.options import say

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
UNEXPECTED = 1


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP: what is half-made is cleaned up as after Ctrl-C. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Within, the first SIGTERM or SIGHUP raises Ended; later ones don't disturb the cleaning up. An ignored one (nohup) stays so."""
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise Ended(number)

    before = {s: signal.signal(s, end) for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_end(command: Callable[..., Any], words: Sequence[str]) -> int:
    """Run a click command (group) with these words; returns the exit code.

    With --json among the words, an error is answered as JSON on standard output, and said on standard error as always.
    """
    as_json = "--json" in words
    try:
        with signals_raise():
            for stream in (sys.stdout, sys.stderr):
                if hasattr(stream, "reconfigure"):  # a terminal of another encoding gets escapes, not a crash
                    stream.reconfigure(errors="backslashreplace")
            code = command(args=list(words), prog_name="builder", standalone_mode=False)
            if sys.stdout:
                sys.stdout.flush()  # what can't be written is to be said now, not after the end
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return _answered(as_json, error.format_message(), "see --help", error.exit_code)
    except (click.Abort, KeyboardInterrupt, InterruptedBuildError) as error:
        return _interrupted(as_json, error)
    except Exception as error:
        return _failed(as_json, error)


def _interrupted(as_json: bool, error: BaseException) -> int:
    cause = next((e for e in (error, error.__cause__) if isinstance(e, Ended)), None)
    message = error.message if isinstance(error, InterruptedBuildError) else "interrupted: nothing half-made was kept"
    hint = "the same command goes on where this one stopped"
    say(message)
    say(f"hint: {hint}")
    return _answered(as_json, message, hint, 128 + cause.number if cause else InterruptedBuildError.exit_code)


def _failed(as_json: bool, error: Exception) -> int:
    if os.environ.get("BUILDER_VERBOSE"):
        say("".join(traceback.format_exception(error)))
    known = explain(error)
    if isinstance(known, OutputClosedError):
        _close_output()
        return known.exit_code
    message = known.message if known else f"unexpected {type(error).__name__}: {error}"
    hint = known.hint if known else "this is a fault of builder: report it, with what BUILDER_VERBOSE=1 shows"
    code = known.exit_code if known else UNEXPECTED
    with contextlib.suppress(OSError):
        say(f"error: {message}")
        if hint:
            say(f"hint: {hint}")
    return _answered(as_json, message, hint, code)


def _answered(as_json: bool, message: str, hint: str, code: int) -> int:
    """The exit code, after the answer for machines where one is wanted."""
    try:
        if as_json:
            click.echo(json.dumps({"error": redact(message), "hint": redact(hint), "exit_code": code}, indent=2))
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        _close_output()
    return code


def _close_output() -> None:
    """Let nothing be written at the interpreter's end to an output that takes nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
