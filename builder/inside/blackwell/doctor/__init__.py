"""Can this image train on this machine? One row per check: what it saw, and what to do.

Exit code 0: nothing failed (warnings allowed); 1: at least one check failed.
Never hangs: 10 s without a GPU, 30 s with.

  blackwell doctor            all checks
  blackwell doctor --quick    those that import nothing (2 s)
  blackwell doctor --no-gpu   judge the image alone, on a machine without a GPU
  blackwell doctor --profile rtx5090.toml    write this card's profile, for `blackwell warm --card`
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blackwell.output import emit_json, emit_table, say

if TYPE_CHECKING:
    from blackwell.doctor.checkup import Checked

HELP = "say whether this image can train on this machine, and what to do if not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `blackwell doctor`."""
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--quick", action="store_true", help="only the checks that answer at once (2 s at most)")
    parser.add_argument(
        "--no-gpu", action="store_true", help="judge the image alone: checks of driver and GPU are skipped"
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="time for everything (default: 10 without a GPU, 30 with)"
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write this card's profile to FILE or stdout, and do nothing else",
    )
    parser.add_argument(
        "--banner", action="store_true", help="three lines for the start of a container; always exit code 0"
    )


def run(args: argparse.Namespace) -> int:
    """Check, print, and return 1 when something failed."""
    if args.profile is not None:
        from blackwell.doctor.profile import write_profile

        return write_profile(args.profile)
    from blackwell.doctor import checkup

    if args.banner:
        _banner()
        return 0
    begin = time.monotonic()
    answers = checkup.check_up(quick=args.quick, judge_gpu=not args.no_gpu, limit=args.limit)
    worst = checkup.verdict(answers)
    if args.json:
        emit_json(_document(answers, str(worst), time.monotonic() - begin))
    else:
        emit_table(("check", "verdict", "saw"), [(a.name, a.finding.verdict, a.finding.saw) for a in answers])
        for answer in answers:
            if answer.finding.todo:
                print(f"{answer.name}: {answer.finding.todo}")
        print(_sentence(answers))
    return 1 if worst == "fail" else 0


def _document(answers: "Sequence[Checked]", worst: str, seconds: float) -> dict[str, object]:
    from blackwell.doctor.checkup import image_identifier

    rows = [
        {
            "name": a.name,
            "verdict": a.finding.verdict,
            "saw": a.finding.saw,
            "todo": a.finding.todo,
            "seconds": a.seconds,
        }
        for a in answers
    ]
    return {"verdict": worst, "image": image_identifier(), "seconds": round(seconds, 2), "checks": rows}


def _sentence(answers: "Sequence[Checked]") -> str:
    """The verdict in one line."""
    counts = {kind: [a for a in answers if a.finding.verdict == kind] for kind in ("fail", "warn", "skip")}
    if counts["fail"]:
        return f"doctor: fail: {counts['fail'][0].finding.saw}" + _more(len(counts["fail"]) - 1, "more failed")
    text = f"doctor: pass, {len(answers)} checks"
    if counts["warn"]:
        text += f", {len(counts['warn'])} with a warning: {counts['warn'][0].finding.saw}" + _more(
            len(counts["warn"]) - 1, "more"
        )
    return text


def _more(count: int, word: str) -> str:
    return f" ({count} {word})" if count > 0 else ""


def _banner() -> None:
    """Image, versions, verdict: for the entrypoint, on stderr, each line as soon as it is known."""
    from blackwell import paths
    from blackwell.doctor import checkup

    try:
        facts = paths.image_facts()
    except (OSError, ValueError):
        facts = {}
    say(f"blackwell image {facts.get('id', 'unknown')}")
    versions = facts.get("versions", {})
    say("  " + (", ".join(f"{name} {version}" for name, version in versions.items() if version) or "versions unknown"))
    sentence = _sentence(checkup.check_up(quick=True))
    say(
        f"  {sentence[:300]}"
        + ("" if sentence.startswith("doctor: pass") and "warning" not in sentence else "; see `blackwell doctor`")
    )
    sys.stderr.flush()
