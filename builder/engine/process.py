"""One door to other programs. Rooms that need a program get a `Runner` as an argument, so tests can pass their own."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from builder.errors import CommandError

# Up to the last @ before a slash: a password may hold one. A token alone, without a colon, is a secret too.
_USERINFO = re.compile(r"(://)[^/\s'\"]*@")
_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|bearer)\s+)[^\s'\"]+", re.IGNORECASE)
# What programs say when the network, a proxy or a name server is the cause.
_NETWORK = (
    "error sending request",
    "dns error",
    "failed to fetch",
    "could not connect",
    "could not resolve",
    "connection refused",
    "network is unreachable",
    "temporary failure",
    "timed out",
)


def redact(text: str) -> str:
    """The text without user names, passwords and tokens: output ends in logs and error messages."""
    return _HEADER.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def network_failed(output: str) -> bool:
    """Is the network the cause, by what a program said?"""
    return any(mark in output.lower() for mark in _NETWORK)


class Runner(Protocol):
    """Runs a program to its end and returns its standard output; raises CommandError if it fails or isn't there."""

    def __call__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        text: str | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> str: ...


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text: str | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run `argv` and return its standard output.

    `env` is added to this process's environment; `text` goes to standard input. With `on_line` every line of output and
    errors is handed on as it comes, and the result holds the last 2,000 of them.
    Raises CommandError with the command, its status and its last lines.
    """
    words = tuple(str(a) for a in argv)
    if os.environ.get("BUILDER_VERBOSE"):
        print(redact(f"+ {shlex.join(words)}"), file=sys.stderr, flush=True)
    try:
        code, output, errors = _finished(words, {**os.environ, **(env or {})}, cwd, text, on_line)
    except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
        raise CommandError(
            _redacted(words), 127, f"{words[0]} can't be started: {error.strerror}", hint="install it, or mend PATH"
        ) from error
    if code:
        raise CommandError(_redacted(words), code, redact(output + errors))
    return output


def _redacted(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(redact(word) for word in words)


def _finished(
    words: tuple[str, ...],
    env: Mapping[str, str],
    cwd: Path | None,
    text: str | None,
    on_line: Callable[[str], None] | None,
) -> tuple[int, str, str]:
    """Status, output and errors of a program that ran to its end."""
    process = subprocess.Popen(
        words,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if on_line else subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        if on_line is None:
            output, errors = process.communicate(text)
            return process.returncode, output, errors
        return _streamed(process, text, on_line)
    except BaseException:  # Ctrl-C included: the child gets the chance to clean up, then goes
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise


def _streamed(process: subprocess.Popen[str], text: str | None, on_line: Callable[[str], None]) -> tuple[int, str, str]:
    last: deque[str] = deque(maxlen=2000)
    if text is not None and process.stdin:
        with contextlib.suppress(BrokenPipeError):  # it went away before it read all: its status tells why
            process.stdin.write(text)
            process.stdin.close()
    assert process.stdout is not None
    for line in process.stdout:
        last.append(redact(line.rstrip("\n")))
        on_line(last[-1])
    return process.wait(), "\n".join(last), ""
