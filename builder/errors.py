"""Every way to fail, one class and one exit code each.

A message says what happened and why; `hint` says what to do next. Only the command line turns an error into an exit.
Exit codes 1 (a fault of builder itself) and 2 (click's usage errors) are not used here; 143 and 129 are SIGTERM and SIGHUP,
which end a command as Ctrl-C does.
"""


class BuilderError(Exception):
    """Base of all errors that a user can meet; never raised itself."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class MatrixError(BuilderError):
    """The matrix files are malformed or contradict themselves; `problems` lists all of them, each with its path."""

    exit_code = 10

    def __init__(self, problems: list[str], *, hint: str = "") -> None:
        super().__init__("the version matrix has errors:\n" + "\n".join(f"  {p}" for p in problems), hint=hint)
        self.problems = problems


class SelectionError(BuilderError):
    """A request names an unknown axis or version, matches nothing, or matches several rows."""

    exit_code = 11


class KnownBadError(BuilderError):
    """A known-bad rule refuses the combination."""

    exit_code = 12


class LockMissingError(BuilderError):
    """The image has no lock yet."""

    exit_code = 13


class LockStaleError(BuilderError):
    """The lock was made from other inputs, or is incomplete."""

    exit_code = 14


class ResolveError(BuilderError):
    """The resolver found no set of distributions, or the index could not be reached."""

    exit_code = 15


class EngineError(BuilderError):
    """No usable Docker Engine, and none may be installed here."""

    exit_code = 16


class EngineTooOldError(BuilderError):
    """The running Docker Engine is older than what is needed."""

    exit_code = 17


class ResourceError(BuilderError):
    """Not enough disk or memory for the build."""

    exit_code = 18


class BusyError(BuilderError):
    """Another build of the same image is running."""

    exit_code = 19


class BuildError(BuilderError):
    """A step of the image build failed."""

    exit_code = 20


class HashMismatchError(BuildError):
    """A downloaded distribution differs from the lock."""

    exit_code = 21


class NetworkError(BuildError):
    """The network or a registry went away in the middle of a build."""

    exit_code = 22


class DriftError(BuildError):
    """A mirror no longer serves the locked versions of the base."""

    exit_code = 23


class BudgetError(BuildError):
    """The image exceeds the size budget of the matrix."""

    exit_code = 24


class VerifyError(BuilderError):
    """An image failed its tests, or none is there to verify."""

    exit_code = 25


class PublishError(BuilderError):
    """A digest can't be published: not verified, or the transport failed."""

    exit_code = 26


class CommandError(BuilderError):
    """A process ended with a non-zero status. Carries `argv`, `code` and the last lines of `output`."""

    exit_code = 27

    def __init__(self, argv: tuple[str, ...], code: int, output: str, *, hint: str = "") -> None:
        import shlex

        tail = "\n".join(output.splitlines()[-20:])
        hint = (
            hint or "mend what these lines say, then run the same command again; BUILDER_VERBOSE=1 shows every command"
        )
        super().__init__(f"`{shlex.join(argv)}` ended with status {code}" + (f":\n{tail}" if tail else ""), hint=hint)
        self.argv = argv
        self.code = code
        self.output = output
        self.tail = tail  # for an error that says in its own words what was tried


class FileError(BuilderError):
    """A file or directory can't be read or written: a full disk, missing rights, something else in its place."""

    exit_code = 28


class DamagedError(BuilderError):
    """Something that was read is not what it should be: cut off, of another format, or no text."""

    exit_code = 29


class TemplateError(BuilderError):
    """The Dockerfile template can't be rendered."""

    exit_code = 30


class NoImageError(BuilderError):
    """The engine has no image of that name."""

    exit_code = 31


class OutputClosedError(BuilderError):
    """Whoever read our output went away, as `| head` does; said by the code alone."""

    exit_code = 141


class InterruptedBuildError(BuilderError):
    """Ctrl-C: nothing half-made is kept; the same command continues from the build cache."""

    exit_code = 130
