"""Fill the kernel caches without a GPU, so that a job on the card compiles nothing.

Runs programs unchanged under the null GPU of each named card; then runs them again in new processes, and fails if anything had to be
compiled a second time. In an image build:

  blackwell warm --image                                      the default workloads for every card of the image
  blackwell warm --card "NVIDIA B200" --workload qwen3.5-27b  a named workload
  blackwell warm --card "NVIDIA B200" -- python train.py      your own script, in a Dockerfile of three lines FROM this image
  blackwell warm --check --card "NVIDIA B200" -- python train.py   in any container of that image: is it still warm?

The caches are those the image's environment names (BLACKWELL_CACHE); a report of all kernels is left beside them. Every rank of a job
should see its GPU as device 0 (its own CUDA_VISIBLE_DEVICES): the index is part of Inductor's keys. --devices N shows N.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blackwell import output, overlay, paths
from blackwell.warm import engine
from blackwell.warm.workloads import WorkloadError

HELP = "fill the kernel caches for a card, without having one"
EXIT_FAILED = 1
SCRIPT_TIMEOUT = 3600  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `blackwell warm`."""
    parser.add_argument(
        "--image", action="store_true", help="every card this image is for (image.json), and the default workloads"
    )
    parser.add_argument(
        "--card", action="append", default=[], metavar="NAME", help="card, as the NVIDIA driver names it; repeatable"
    )
    parser.add_argument("--workload", action="append", default=[], metavar="NAME", help="workload to run; repeatable")
    parser.add_argument(
        "--jobs", type=at_least_one, metavar="N", help="programs at once (default: by cores and memory)"
    )
    parser.add_argument(
        "--devices", type=devices, default=1, metavar="N", help="devices a program sees, 1 to 16 (default: 1)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help=f"seconds a program may take (default: the workload's; {SCRIPT_TIMEOUT})",
    )
    parser.add_argument(
        "--bundle",
        type=file_name,
        metavar="FILE",
        help="measured choices of `blackwell tune`, preferred on their cards",
    )
    parser.add_argument("--cache", type=file_name, metavar="DIR", help="cache to fill (default: BLACKWELL_CACHE)")
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument(
        "--check", action="store_true", help="fill nothing: only run as a job would, and fail if anything is compiled"
    )
    checks.add_argument("--no-check", action="store_true", help="skip the second pass that must find everything warm")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("program", nargs="*", metavar="-- PROGRAM", help="your own program and its arguments, after --")


def seconds(text: str) -> float:
    """A positive number of seconds. Raises ValueError, from which argparse makes its own sentence."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def at_least_one(text: str) -> int:
    """A positive number. Raises ValueError."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def devices(text: str) -> int:
    """A number of devices that the null GPU can show. Raises ValueError."""
    from blackwell.nullgpu import MAX_DEVICES

    value = at_least_one(text)
    if value > MAX_DEVICES:
        raise ValueError(text)
    return value


def file_name(text: str) -> Path:
    """A path; no path is not the current directory. Raises ValueError."""
    if not text.strip():
        raise ValueError(text)
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Warm, check, report, seal. Exit code 1, with the reason, when a program fails or the second pass is not warm."""
    from blackwell import nullgpu
    from blackwell.warm.bundle import BundleError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the programs end with us
    try:
        summary = _run(args)
    except (engine.WarmError, WorkloadError, BundleError, nullgpu.NullGpuError) as error:
        if args.json:
            output.emit_json({"error": str(error)})
        output.say(f"blackwell warm: {error}")
        return EXIT_FAILED
    if args.json:
        output.emit_json(summary)
    else:
        output.emit_table(("what", "value"), list(summary.items()))
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from blackwell import nullgpu
    from blackwell.warm import bundle, cleanup, report

    started = time.monotonic()
    cache = _cache(args)
    if args.check and args.cache:  # as a job whose caches these are: what it misses goes to an overlay
        os.environ.update(
            BLACKWELL_CACHE=str(cache),
            TRITON_CACHE_DIR=str(cache / "triton"),
            TORCHINDUCTOR_CACHE_DIR=str(cache / "inductor"),
        )
    setting = engine.Setting(
        cache=cache, devices=args.devices, jobs=args.jobs or engine.default_jobs(), as_a_job=args.check
    )
    measured = bundle.merge(bundle.load(path) for path in _bundles(args))
    path = cache / report.REPORT
    before = _report_before(path)
    jobs = _jobs(args)
    for name in dict.fromkeys(job.card.name for job in jobs):
        nullgpu.announce(name, args.devices)
    if args.check:
        results = engine.check(jobs, setting, strict_bypass=not args.program)
        return {"runs": len(results), "kernels_found": sum(outcome.hits for _, outcome in results), "compiled": 0}
    # For this process and its probes too: an overlay of theirs would stay in an image.
    os.environ["BLACKWELL_OVERLAY"] = "off"
    capabilities = sorted({job.card.capability for job in jobs})
    output.say(
        f"blackwell warm: {len(jobs)} runs for compute capabilities {', '.join(capabilities)}, {setting.jobs} at once, into {cache}"
    )
    outcomes = engine.warm(jobs, setting)
    cleanup.remove_noise(cache)
    cards = list(dict.fromkeys([*before.get("cards", []), *(job.card.name for job in jobs)]))
    assembler = report.assembler_label(_assemblers(cards))
    facts = {
        "fingerprint": cache.name, "assembler": assembler, "cards": cards, "capabilities": _capabilities(cards), "profiles": _profiles(cards),
    }  # fmt: skip
    content = report.make(cache, outcomes, before, facts)
    if measured:
        named = [job.card.name for job in jobs]
        for problem in bundle.apply(
            cache, content["choices"], measured, cards=list(dict.fromkeys(named)), triton=version("triton")
        ):
            output.say(f"blackwell warm: a measured choice is not used: {problem}")
    before_check = cleanup.files(cache)
    if not args.no_check:
        engine.check(jobs, setting, strict_bypass=not args.program)
        cleanup.remove_noise(cache)
        if gained := sorted(cleanup.files(cache) - before_check):
            raise engine.WarmError(
                f"the second pass found everything, and still wrote {len(gained)} files: {', '.join(gained[:5])}"
            )
    path.write_text(json.dumps(content, indent=1) + "\n")
    summary = report.summary(cache, content, cards, assembler)
    if _is_the_images(cache):  # its directory is ours; a cache elsewhere may lie in /tmp
        (cache.parent / report.SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
        for place, mode in ((cache.parent, 0o755), (cache.parent / report.SUMMARY, 0o644)):
            place.chmod(mode)
    _seal(cache, facts)
    output.say(
        f"blackwell warm: {summary['cache.entries']} kernels, {summary['cache.bytes'] / 1e6:.1f} MB, {time.monotonic() - started:.0f} s"
    )
    return summary


def _bundles(args: argparse.Namespace) -> list[Path]:
    """Files with measured choices: for an image those that lie in its sources, then the one that is asked for, which wins."""
    shipped = sorted(paths.data("bundles").glob("*.json")) if args.image else []
    return [*shipped, *([args.bundle] if args.bundle else [])]


def _is_the_images(cache: Path) -> bool:
    baked = paths.baked_cache()
    return (
        baked is not None and baked.exists() and baked.samefile(cache) and cache.is_relative_to(paths.root().resolve())
    )


def _report_before(path: Path) -> dict[str, Any]:
    """What an earlier warming of this cache reported, or {}. Raises WarmError when there is a report that is none."""
    try:
        before = json.loads(path.read_text())
        if not isinstance(before, dict):
            raise ValueError("no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise engine.WarmError(
            f"{path} is no report of an earlier warming ({error}): remove it, or warm into another directory."
        ) from error
    return before


def _cache(args: argparse.Namespace) -> Path:
    """The cache to fill, existing and writable. Raises WarmError otherwise."""
    cache = args.cache or paths.baked_cache()
    if cache is None:
        raise engine.WarmError(
            "no cache to fill: BLACKWELL_CACHE is not set, so this is not one of our images; name a directory with --cache."
        )
    if args.check:
        if not (cache / overlay.SEAL).is_file():
            raise engine.WarmError(
                f"{cache} is no warm cache (it has no {overlay.SEAL}), so there is nothing to check: warm it first, without --check."
            )
        return Path(cache).resolve()
    if cache.exists() and not cache.is_dir():
        raise engine.WarmError(f"{cache} is no directory: name one with --cache DIR.")
    try:
        for part in ("triton", "inductor"):
            (cache / part).mkdir(parents=True, exist_ok=True)
        writable = os.access(cache, os.W_OK) and os.access(cache / "triton", os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise engine.WarmError(
            f"{cache} can't be written by user {os.geteuid()}: warm in an image build (as root), or elsewhere with --cache DIR."
        )
    return Path(cache).resolve()


def _jobs(args: argparse.Namespace) -> list[engine.Job]:
    """What to run, from the arguments. Raises WarmError for a request that says too little or too much."""
    from blackwell import nullgpu
    from blackwell.warm import child, workloads

    if args.program and args.workload:
        raise engine.WarmError("name workloads or give a program after --, not both.")
    names = list(args.card)
    if not names:
        if not args.image and not args.workload and not args.program:
            raise engine.WarmError('what for? --card "NVIDIA B200" for a card, --image for every card of this image.')
        try:
            names = list(paths.image_facts()["cards"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise engine.WarmError(
                f"{paths.root()}/image.json names no cards ({error!r}): say them with --card NAME."
            ) from error
    if not names:
        raise engine.WarmError(f"{paths.root()}/image.json has an empty list of cards: say them with --card NAME.")
    cards = [nullgpu.card_named(name) for name in dict.fromkeys(names)]
    if args.program:
        if shutil.which(args.program[0]) is None:
            raise engine.WarmError(
                f"there is no program {args.program[0]!r} here; write it as in a shell: -- python train.py"
            )
        timeout = args.timeout or SCRIPT_TIMEOUT
        return [
            engine.Job(name=" ".join(args.program), argv=tuple(args.program), card=card, timeout=timeout)
            for card in cards
        ]
    chosen = workloads.select(args.workload, workloads.load())
    return [
        engine.Job(
            name=f"{workload.name}/{run.name}",
            argv=tuple(child.python_argv(run.argv)),
            card=card,
            timeout=args.timeout or workload.timeout,
        )
        for card in cards
        for workload in chosen
        for run in workload.runs
    ]


def _capabilities(cards: list[str]) -> list[str]:
    """The image's compute capabilities, which its fingerprint is made of; outside an image those of the cards."""
    from blackwell import nullgpu

    try:
        return [str(capability) for capability in paths.image_facts()["capabilities"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return sorted(
        {nullgpu.card_named(name).capability for name in cards}, key=lambda text: tuple(map(int, text.split(".")))
    )


def _assemblers(cards: list[str]) -> dict[str, str]:
    """Version texts of the assemblers that these cards' kernels were made with."""
    from blackwell import fingerprint, nullgpu

    try:
        return fingerprint.assembler_texts([nullgpu.card_named(name).capability for name in cards])
    except fingerprint.FingerprintError as error:
        raise engine.WarmError(str(error)) from error


def _profiles(cards: list[str]) -> dict[str, dict[str, Any]]:
    """Where each card's profile is from: what isn't in a key is baked in silently, so the report says whether it was measured."""
    from blackwell import nullgpu

    known = {name: nullgpu.card_named(name) for name in cards}
    return {
        name: {"capability": card.capability, "measured": card.measured, "source": card.source}
        for name, card in known.items()
    }


def _seal(cache: Path, facts: dict[str, Any]) -> None:
    from blackwell import source_keys
    from blackwell.kernels import seal

    try:
        (cache / source_keys.FILE).write_text(json.dumps(source_keys.gather(), indent=1) + "\n")
        seal(cache, facts)
    except ValueError as error:
        raise engine.WarmError(f"the caches are full, but damaged: {error}") from error


if __name__ == "__main__":
    from blackwell.cli import main

    sys.exit(main(["warm", *sys.argv[1:]]))
