"""Measure, on a real GPU, which configuration of each autotuned kernel is fastest, and write the result as a bundle.

  blackwell tune --out b200.json                          the default workloads
  blackwell tune --out b200.json -- python train.py       your own script
  blackwell tune --merge b200.json 5090.json --out all.json

The caches' kernels are used as they are, only the choices are made anew, in a private place. A build takes the bundle with
`blackwell warm --bundle FILE`, for the cards named in it.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blackwell import output, paths
from blackwell.warm import bundle

HELP = "on a real GPU, measure the autotuners' choices and write them as a bundle"
TIMEOUT = 3600.0  # seconds a program


class TuneError(Exception):
    """Nothing could be measured; the text says why and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `blackwell tune`."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="bundle to write")
    parser.add_argument("--workload", action="append", default=[], metavar="NAME", help="workload to run; repeatable")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="BUNDLE", help="measure nothing: join these, later ones win"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help=f"seconds a program may take (default: {TIMEOUT:.0f})",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.add_argument("program", nargs="*", metavar="-- PROGRAM", help="your own program and its arguments, after --")


def run(args: argparse.Namespace) -> int:
    """Measure or merge. Exit code 1, with the reason, when there is no card, a program fails, or a bundle is wrong."""
    from blackwell.warm.workloads import WorkloadError

    try:
        check_writable(args.out)  # before an hour of measuring
        entries = bundle.merge([bundle.load(path) for path in args.merge]) if args.merge else measure(args)
        write(args.out, bundle.dumps(entries))
    except (TuneError, WorkloadError, bundle.BundleError) as error:
        if args.json:
            output.emit_json({"error": str(error)})
        output.say(f"blackwell tune: {error}")
        return 1
    rows = [(entry.card, entry.kernel, len(entry.configs), *_best(entry)) for entry in entries]
    if args.json:
        header = ("card", "kernel", "configs", "best", "ms")
        output.emit_json({"out": str(args.out), "entries": [dict(zip(header, row, strict=True)) for row in rows]})
    else:
        output.emit_table(("card", "kernel", "configs", "best", "ms"), rows)
    return 0


def check_writable(out: Path) -> None:
    """Raises TuneError when the bundle could not be written there."""
    if not out.name or out.is_dir() or (out.exists() and not out.is_file()):
        raise TuneError(f"{str(out)!r} is no file that a bundle could be written to: name one with --out FILE.")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise TuneError(f"{out.parent} is no directory that this user can write to: name another file with --out FILE.")


def write(out: Path, text: str) -> None:
    """Write the bundle whole or not at all: FILE may be one of those that were merged. Raises TuneError."""
    from blackwell.kernels.sums import write_atomic

    try:
        write_atomic(out, text.encode())
    except OSError as error:
        raise TuneError(f"{out} can't be written: {error.strerror}. What was there before is untouched.") from error


def _best(entry: bundle.Entry) -> tuple[dict[str, Any], float]:
    config, ms = min(entry.configs, key=lambda pair: pair[1])
    return dict(config), ms  # infinite where the card refused all: `emit_json` writes null


def measure(args: argparse.Namespace) -> list[bundle.Entry]:
    """Run the programs on the card and collect what their autotuners measured. Raises TuneError."""
    from blackwell import nullgpu
    from blackwell.warm import child

    if nullgpu.is_on():
        raise TuneError("the null GPU is on, and its kernels take no time: run this on a real card, without it.")
    if not nullgpu.driver_visible():
        raise TuneError(
            "no NVIDIA driver is visible here: run this on a machine with the card (docker run --gpus all ...)."
        )
    about = _card_and_versions()
    entries: list[bundle.Entry] = []
    with tempfile.TemporaryDirectory(prefix="blackwell-tune-") as temporary:
        environment = private_caches(Path(temporary))
        for argv in _programs(args):
            outcome = child.run(argv, environment, card=about["card"], timeout=args.timeout, limits=None)
            if outcome.problem:
                raise TuneError(f"{' '.join(argv)} {outcome.problem}. Its last output:\n{outcome.output.rstrip()}")
            compiled = f", {len(outcome.misses)} of them compiled: not warm for this card" if outcome.misses else ""
            output.say(
                f"blackwell tune: {' '.join(argv)}: {len(outcome.kernels)} kernels asked for{compiled}, {outcome.seconds:.0f} s"
            )
        entries = bundle.collect(Path(environment["TRITON_CACHE_DIR"]), **about)
    if not entries:
        raise TuneError(
            "the programs used no autotuned kernel whose results Triton keeps, so there is nothing to write."
        )
    return entries


def private_caches(directory: Path) -> dict[str, str]:
    """This process's environment with a private view of the baked caches that holds kernels but no autotune results."""
    from blackwell import overlay

    environment = {**os.environ, "BLACKWELL_OVERLAY": str(directory / "overlay"), "TRITON_CACHE_AUTOTUNING": "1"}
    cache = paths.baked_cache()
    if cache is not None:
        # The start-up hook may have pointed these elsewhere for this very process.
        environment |= {"TRITON_CACHE_DIR": str(cache / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    if overlay.apply(environment) is None:
        output.say(
            "blackwell tune: no sealed cache of an image here (BLACKWELL_CACHE): every kernel will be compiled first"
        )
        for name, part in overlay.VARIABLES.items():
            (directory / part).mkdir()
            environment[name] = str(directory / part)
    for result in Path(environment["TRITON_CACHE_DIR"]).glob(f"*/*{bundle.SUFFIX}"):
        result.unlink()
    return environment


def _programs(args: argparse.Namespace) -> list[Sequence[str]]:
    from blackwell.warm import child, workloads

    if args.program:
        if shutil.which(args.program[0]) is None:
            raise TuneError(f"there is no program {args.program[0]!r} here; write it as in a shell: -- python train.py")
        return [args.program]
    return [
        child.python_argv(run.argv)
        for workload in workloads.select(args.workload, workloads.load())
        for run in workload.runs
    ]


def _card_and_versions() -> dict[str, str]:
    import torch
    import triton

    if not torch.cuda.is_available():
        raise TuneError("torch sees no GPU although an NVIDIA driver is here: `blackwell doctor` looks further.")
    major, minor = torch.cuda.get_device_capability()
    return {
        "card": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "triton": triton.__version__,
        "torch": torch.__version__,
    }
