"""Errors that others raise (the operating system, the Docker SDK, parsers) in our words, so that no traceback meets a user."""

import errno
import json
import tarfile
import tomllib
import zlib
from xml.etree.ElementTree import ParseError

import docker.errors
import jinja2
import requests

from builder.errors import BuilderError, DamagedError, EngineError, FileError, OutputClosedError, TemplateError

_DAMAGE = (json.JSONDecodeError, UnicodeDecodeError, tomllib.TOMLDecodeError, tarfile.TarError, zlib.error, EOFError, ParseError)  # fmt: skip
# What to do about an error number of the operating system.
_NEXT = {
    errno.ENOSPC: "free some space there, or set TMPDIR and BUILDER_STORE to a larger disk; then run the same command again",
    errno.EDQUOT: "free some of your quota, or set TMPDIR and BUILDER_STORE to another disk; then run the same command again",
    errno.EROFS: "name another place (BUILDER_STORE for the store, TMPDIR for temporary files), or mount it writable",
    errno.EACCES: "run as a user who may, or name another place (BUILDER_STORE for the store, TMPDIR for temporary files)",
    errno.EPERM: "run as a user who may, or name another place (BUILDER_STORE for the store, TMPDIR for temporary files)",
    errno.ENOENT: "bring it back, for a file of the repository with `git checkout`; then run the same command again",
    errno.EISDIR: "a directory is where a file should be: move it away, then run the same command again",
    errno.ENOTDIR: "a file is where a directory should be: move it away, or name another place (BUILDER_STORE for the store)",
    errno.EEXIST: "something else is in its place: move it away, or name another place",
    errno.ENAMETOOLONG: "use a shorter name",
}


def explain(error: Exception) -> BuilderError | None:
    """The error as one of ours, or None for a fault of builder itself."""
    if isinstance(error, BuilderError):
        return error
    if isinstance(error, (docker.errors.DockerException, requests.exceptions.RequestException)):
        return EngineError(
            f"Docker Engine did not do what it was asked: {error}",
            hint="see with `docker info` whether it still runs, then run the same command again",
        )
    if isinstance(error, jinja2.TemplateError):
        return TemplateError(
            f"a template can't be rendered: {error}",
            hint="mend it (Dockerfile.j2, or builder/layout/*.j2 for a report), or bring it back with `git checkout`",
        )
    if isinstance(error, BrokenPipeError):
        return OutputClosedError("nobody reads our output any more", hint="read all of it")
    if isinstance(error, OSError):
        name = error.filename2 or error.filename
        what = f"{name}: {error.strerror}" if name else f"writing or reading failed: {error.strerror or error}"
        return FileError(what, hint=_NEXT.get(error.errno or 0, "mend that, then run the same command again"))
    if isinstance(error, _DAMAGE):
        return DamagedError(
            f"something that was read is damaged: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="BUILDER_VERBOSE=1 shows what was read; what lies in the store is made anew after `builder engine --empty-store`",
        )
    return None
