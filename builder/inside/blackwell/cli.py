"""The `blackwell` command: a registry of subcommands, each a module that is imported only when it is asked for.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> int` (the exit code).
"""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": "blackwell.doctor",
    "kernels": "blackwell.kernels",
    "status": "blackwell.status",
    "step": "blackwell.step",
    "tune": "blackwell.tune",
    "warm": "blackwell.warm",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; an unknown one exits with 2 and names the known ones."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="blackwell", description="Tools inside a pinned, prewarmed Blackwell training image."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, module_name in COMMANDS.items():
        if asked in COMMANDS and name != asked:
            commands.add_parser(name, add_help=False)  # known to the parser, not imported: start-up stays cheap
            continue
        module = importlib.import_module(module_name)
        sub = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # `blackwell kernels list | head`: who reads has seen enough
        _let_stdout_go()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"blackwell {args.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
            raise
        _let_stdout_go()
        print(
            f"blackwell {args.command}: nothing more can be written ({error}): free some space, or write elsewhere",
            file=sys.stderr,
        )
        return 1
    return code


def _let_stdout_go() -> None:
    """What is still in the buffer can't be written: the interpreter must not try again, and complain, when it ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
