"""The `blackwell` command: a registry of subcommands, each a module that is imported only when it is asked for.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(args) -> int` (the exit code).
"""

import argparse
import importlib
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
    return int(args.run(args))
