"""Directories of the user: home, cache and settings. An empty variable counts as unset, as everywhere on Unix."""

import os
from pathlib import Path

from builder.errors import FileError


def variable(name: str) -> str:
    """An environment variable, "" if it is unset."""
    return os.environ.get(name, "")


def home() -> Path:
    """The home directory. Raises FileError for a user who has none: a UID that nobody knows, without HOME."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise FileError(
            f"this user (UID {os.getuid()}) has no home directory and HOME is not set",
            hint="set HOME, or BUILDER_STORE and XDG_CONFIG_HOME, to directories that this user can write to",
        ) from error


def of_user(name: str, below_home: str) -> Path:
    """A directory of the XDG standard, which ignores relative paths: the variable's, else one below home."""
    named = Path(variable(name))
    return named if named.is_absolute() else home() / below_home
