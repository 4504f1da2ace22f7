"""Checks of the installed packages: are they the locked ones, do they import, and which path do they take."""

import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping

from blackwell import paths
from blackwell.doctor.checks_gpu import null_gpu
from blackwell.doctor.finding import Finding, Seen, Stage, failed, passed, skipped, warned

VITAL = re.compile(r"torch|triton|fla-core|flash-linear-attention|causal-conv1d|nvidia-.*|cuda-.*")
"""Distributions (normalized names) that the kernels and their cache depend on: another version is a failure."""

REINSTALL = (
    "go back with `pip install --force-reinstall -r /opt/blackwell/constraints.txt`, or start from the image again"
)

SLOW = "a slow disk or a busy machine? `blackwell doctor --limit 120` gives imports more time"

NAMELESS_ERROR = "No username set"
NAMELESS = "this user id has no name, and torch's Inductor asks for it at import: set USER to any word"
# Where an import fails for something else than what is installed: a mark in its error -> what to do.
CAUSES = {
    NAMELESS_ERROR: NAMELESS,
    "No usable temporary directory": "give it a directory for temporary files: `--tmpfs /tmp`, or TMPDIR",
}


def normalize(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_constraints(text: str) -> dict[str, str]:
    """constraints.txt -> normalized name -> exact version; comments and other lines are left out."""
    pins = {}
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z0-9][\w.-]*)\s*==\s*([^\s;#]+)", line)
        if match:
            pins[normalize(match[1])] = match[2]
    return pins


def distributions(seen: Seen) -> Finding:
    """What is installed against what was locked: somebody forced another version, removed one, or shadows one."""
    try:
        pins = read_constraints((paths.root() / "constraints.txt").read_text())
    except OSError as problem:
        return failed(f"the list of locked distributions can't be read: {problem}", "start from the image again")
    installed: dict[str, tuple[str, str]] = {}
    for distribution in importlib.metadata.distributions():  # in the order of sys.path: the first one is imported
        if name := distribution.metadata["Name"]:
            installed.setdefault(normalize(name), (distribution.version, str(distribution.locate_file(""))))
    wrong: dict[str, str] = {}
    for name, version in pins.items():
        if name not in installed:
            wrong[name] = f"{name} {version} is gone"
        elif not same_version(installed[name][0], version):
            wrong[name] = f"{name} is {installed[name][0]}, locked {version}"
            if not installed[name][1].startswith(sys.prefix):
                wrong[name] += f" (from {installed[name][1]})"
    text = "; ".join(wrong[name] for name in sorted(wrong, key=lambda name: (VITAL.fullmatch(name) is None, name)))
    if any(VITAL.fullmatch(name) for name in wrong):
        return failed(text, REINSTALL)
    if wrong:
        return warned(text, REINSTALL)
    return passed(f"all {len(pins)} locked distributions are as locked")


def same_version(installed: str, locked: str) -> bool:
    """Equal, where a lock without a local part ("2.12.1") accepts any ("2.12.1+cu130")."""
    return installed == locked or ("+" not in locked and installed.partition("+")[0] == locked)


def pip_constraint(seen: Seen) -> Finding:
    """Whether pip and uv are held to the locked versions."""
    loose = []
    for name in ("PIP_CONSTRAINT", "UV_CONSTRAINT"):
        files = seen.environment.get(name, "").split()
        if not files:
            loose.append(f"{name} is not set")
        elif str(paths.root() / "constraints.txt") not in files:
            loose.append(f"{name}={' '.join(files)} leaves out {paths.root() / 'constraints.txt'}")
        elif gone := [file for file in files if not os.path.isfile(file)]:
            loose.append(f"{name} names {', '.join(gone)}, which isn't there")
    if loose:
        return warned(
            f"{'; '.join(loose)}: an install can replace torch or Triton",
            f"set it to {paths.root() / 'constraints.txt'}",
        )
    return passed("pip and uv are held to the locked versions")


def _todo(error: str, otherwise: str) -> str:
    """What to do about a failed import."""
    return next((todo for mark, todo in CAUSES.items() if mark in error), otherwise)


def _import(seen: Seen, stage_name: str, library: str, todo: str) -> Stage | Finding:
    """The stage of the import probe, or the finding that says why there is none."""
    stage = seen.imports.get(stage_name)
    if stage is None or not stage.reached:
        return skipped(f"not reached: {stage.error if stage else 'the import probe did not start'}")
    if stage.slow:
        return warned(f"{library}: {stage.error} while importing it", SLOW)
    if stage.error:
        return failed(f"{library} doesn't import: {stage.error}", _todo(stage.error, todo))
    return stage


def triton(seen: Seen) -> Finding:
    """Whether Triton imports and is the image's."""
    stage = _import(seen, "triton", "Triton", REINSTALL)
    return stage if isinstance(stage, Finding) else _same(stage.facts, seen.version("triton"), "Triton")


def torch(seen: Seen) -> Finding:
    """Whether torch imports, is the image's, holds code for these capabilities, and sees the GPU."""
    stage = _import(seen, "torch", "torch", REINSTALL)
    if isinstance(stage, Finding):
        return stage
    found = _same(stage.facts, seen.version("torch"), "torch")
    if found.verdict != "pass":
        return found
    cuda, wanted = stage.facts["cuda"], seen.version("cuda")
    if cuda is None:
        return failed("this torch is built without CUDA", REINSTALL)
    if wanted and not wanted.startswith(cuda) and not cuda.startswith(wanted):
        return failed(f"torch is built for CUDA {cuda}, the image for {wanted}", REINSTALL)
    majors = {re.sub(r"\D", "", arch)[:-1] for arch in stage.facts["arches"]}
    lacking = sorted(
        {str(c) for c in (seen.facts or {}).get("capabilities", ()) if str(c).partition(".")[0] not in majors}
    )
    if stage.facts["arches"] and lacking:
        return failed(f"torch has no code for {', '.join(lacking)}, only {' '.join(stage.facts['arches'])}", REINSTALL)
    if seen.judge_gpu and seen.gpus.gpus and not stage.facts["sees_gpu"]:
        return failed("there are GPUs, but torch.cuda.is_available() is False", "see the checks `libcuda` and `gpus`")
    return passed(f"{found.saw}, CUDA {cuda}, {'sees the GPU' if stage.facts['sees_gpu'] else 'sees no GPU'}")


def _same(facts: Mapping[str, object], wanted: str | None, library: str) -> Finding:
    version = str(facts["version"])
    if wanted and not same_version(version, wanted):
        return failed(f"{library} {version} from {facts['file']} is imported, the image has {wanted}", REINSTALL)
    return passed(f"{library} {version}")


def fla(seen: Seen) -> Finding:
    """Which path FLA takes. It only warns and goes on with the CPU when Triton's driver doesn't start."""
    flags = _import(seen, "fla flags", "FLA", REINSTALL)
    if isinstance(flags, Finding):
        return flags
    whole = seen.imports["fla"]
    if whole.error and whole.reached and not whole.slow:
        return failed(f"FLA doesn't import: {whole.error}", _todo(whole.error, REINSTALL))
    if whole.facts and (found := _same(whole.facts, seen.version("fla"), "FLA")).verdict != "pass":
        return found
    # `import fla` loads all of its models, several times as long as torch: its flags alone are enough to judge by.
    text = f"FLA {whole.facts['version']}" if whole.facts else "FLA's flags (the whole import had no time)"
    if not seen.judge_gpu or not seen.gpus.gpus:
        return passed(f"{text} imported; which path it takes is seen on a GPU only")
    said = "; ".join([*flags.facts["warnings"], *whole.facts.get("warnings", ())])
    if flags.facts["platform"] != "cuda":
        target = seen.imports["torch"]
        cause = said or target.error or "no reason given"
        return failed(
            f"{text} takes the path for {flags.facts['platform']!r}, not CUDA: {cause}",
            "see the checks `compiler`, `ldconfig` and `libcuda`: FLA falls back when Triton's driver doesn't start",
        )
    if said:
        return failed(f"{text} says at import: {said}", "see the checks `compiler`, `ldconfig` and `libcuda`")
    path = "Blackwell" if flags.facts["blackwell"] else "CUDA, but not Blackwell"
    return passed(f"{text}, path: {path}")


def conv1d(seen: Seen) -> Finding:
    """Whether causal-conv1d's CUDA extension loads, and who takes it."""
    stage = _import(seen, "causal_conv1d", "causal-conv1d", "it is built for another torch: " + REINSTALL)
    wanted = seen.version("conv1d")
    if isinstance(stage, Finding):
        return stage
    serves = "FLA's Triton convolution serves"
    if not stage.facts["installed"]:
        if wanted and wanted != "none":
            return failed(f"causal-conv1d {wanted} belongs to this image, but isn't installed: {serves}", REINSTALL)
        return passed(f"not part of this image; {serves}")
    version = str(stage.facts["version"])
    # The package's own __version__ leaves out what follows ".post", so only its beginning is compared.
    if wanted and wanted != "none" and not wanted.startswith(version) and not version.startswith(wanted):
        return failed(f"causal-conv1d {version} is imported, the image has {wanted}", REINSTALL)
    return passed(f"causal-conv1d {version}, extension loads")


def transformers(seen: Seen) -> Finding:
    """Whether transformers' gated-delta models take FLA and causal-conv1d, or their slow torch code."""
    stage = _import(seen, "transformers", "transformers", REINSTALL)
    if isinstance(stage, Finding):
        return stage
    if not stage.facts["installed"]:
        return skipped("transformers is not installed")
    if not seen.judge_gpu or null_gpu(seen.environment) or not seen.gpus.gpus:
        return skipped("transformers decides on a GPU only")
    names = {"fla": "FLA", "conv1d": "causal-conv1d"}
    if seen.version("conv1d") in (None, "none"):
        del names["conv1d"]
    slow = [name for key, name in names.items() if not stage.facts[key]]
    if slow:
        return failed(
            f"transformers does not take {' and '.join(slow)}: it runs slow torch code instead",
            "see the checks `fla` and `conv1d`",
        )
    return passed(f"takes {' and '.join(names.values())}")
