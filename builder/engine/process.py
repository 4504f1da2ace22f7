"""One door to other programs. Rooms that need a program get a `Runner` as an argument, so tests can pass their own."""

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

_USERINFO = re.compile(r"(://)[^/@\s:]*:[^/@\s]*@")


def redact(text: str) -> str:
    """The text without user names and passwords in URLs: output ends in logs and error messages."""
    return _USERINFO.sub(r"\1***@", text)


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
        print(f"+ {shlex.join(words)}", file=sys.stderr, flush=True)
    full_env = {**os.environ, **(env or {})}
    try:
        if on_line is None:
            done = subprocess.run(
                words, env=full_env, cwd=cwd, input=text, capture_output=True, text=True, errors="replace", check=False
            )
            if done.returncode:
                raise CommandError(words, done.returncode, redact(done.stdout + done.stderr))
            return done.stdout
        return _stream(words, full_env, cwd, text, on_line)
    except FileNotFoundError as error:
        raise CommandError(words, 127, f"{words[0]} is not installed") from error


def _stream(
    words: tuple[str, ...], env: Mapping[str, str], cwd: Path | None, text: str | None, on_line: Callable[[str], None]
) -> str:
    last: deque[str] = deque(maxlen=2000)
    stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
    process = subprocess.Popen(
        words,
        env=env,
        cwd=cwd,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        if text is not None and process.stdin:
            process.stdin.write(text)
            process.stdin.close()
        assert process.stdout is not None
        for line in process.stdout:
            last.append(redact(line.rstrip("\n")))
            on_line(last[-1])
        code = process.wait()
    except BaseException:  # Ctrl-C included: the child gets the chance to clean up, then goes
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if code:
        raise CommandError(words, code, "\n".join(last))
    return "\n".join(last)
