"""Checks of the NVIDIA driver, its libraries and the GPUs."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from blackwell import paths
from blackwell.doctor.finding import Finding, Seen, failed, passed, skipped, warned
from blackwell.doctor.gpus import Gpu

START_WITH_GPUS = "start the container with --gpus all (Docker) or ask for nvidia.com/gpu (Kubernetes)"

CUDA_ERRORS = {
    100: ("no GPU is visible to CUDA", START_WITH_GPUS + "; check CUDA_VISIBLE_DEVICES"),
    101: ("CUDA_VISIBLE_DEVICES names a GPU that isn't there", "correct or unset CUDA_VISIBLE_DEVICES"),
    802: (
        "the GPUs are not initialized yet",
        "on NVSwitch machines start nvidia-fabricmanager on the host, then try again",
    ),
    803: (
        "the loaded libcuda doesn't fit the host's NVIDIA driver",
        "remove the libcuda.so that the container brings: the host's is mounted in",
    ),
    804: (
        "forward-compatibility libraries are in use on a board that doesn't support them",
        "take cuda/compat out of LD_LIBRARY_PATH and /etc/ld.so.conf.d, run ldconfig, and use a newer host driver",
    ),
    999: (
        "the NVIDIA driver failed inside (unknown error)",
        "look into the host's dmesg for Xid lines; reboot the host",
    ),
}
"""What cuInit answers when it fails: what it means, and what to do."""


def null_gpu(environment: Mapping[str, str]) -> str | None:
    """What puts a null GPU under this process, None when there is none."""
    own = str(paths.nullgpu_lib())
    for path in re.split(r"[\s:]+", environment.get("LD_PRELOAD", "")):
        if "nullgpu" in path or (path and path.startswith(own)):
            return f"LD_PRELOAD holds {path}"
    try:
        system = Path("/etc/ld.so.preload").read_text()
    except OSError:
        return None
    return f"/etc/ld.so.preload holds {system.strip()}" if "nullgpu" in system else None


def _not_judged(seen: Seen) -> Finding | None:
    """A skip with its reason when there is no real GPU to be judged on purpose."""
    if not seen.judge_gpu:
        return skipped("not judged: --no-gpu")
    return None


def driver(seen: Seen) -> Finding:
    """The host's NVIDIA driver against the floor of this image's CUDA."""
    if left := _not_judged(seen):
        return left
    if null_gpu(seen.environment):
        return skipped("the null GPU stands in for the NVIDIA driver")
    version, floor = seen.gpus.driver, str((seen.facts or {}).get("driver_floor") or "")
    if version is None:
        return failed(
            "no NVIDIA driver is visible here",
            f"{START_WITH_GPUS}, on a host with {f'NVIDIA driver {floor} or newer' if floor else 'a new enough NVIDIA driver'}",
        )
    where = f"NVIDIA driver {version} ({seen.gpus.driver_source})"
    if not floor:
        return skipped(f"{where}; the image names no floor to compare it with")
    if _numbers(version) < _numbers(floor):
        cuda = seen.version("cuda") or ""
        return failed(
            f"{where} is older than {floor}, which CUDA {cuda} needs",
            f"update the host's driver to {floor} or newer, or use an image with an older CUDA (a cu128 row)",
        )
    return passed(f"{where}, floor {floor}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def libcuda(seen: Seen) -> Finding:
    """Which libcuda loads, and what cuInit says."""
    if left := _not_judged(seen):
        return left
    report = seen.gpus
    if report.libcuda is None:
        why = report.problems.get("cuda", "not loaded")
        if report.driver is None:
            return skipped(f"no NVIDIA driver, so no libcuda ({why})")
        return failed(
            f"libcuda.so.1 doesn't load: {why}",
            "set NVIDIA_DRIVER_CAPABILITIES=compute,utility and start the container again",
        )
    if report.cuda_init is None:
        return failed(
            f"cuInit in {report.libcuda} didn't return: {report.problems.get('cuda', '')}",
            "look into the host's dmesg for Xid lines",
        )
    if report.cuda_init != 0:
        meaning, todo = CUDA_ERRORS.get(
            report.cuda_init, ("unknown error", "look it up in NVIDIA's table of CUresult values")
        )
        return failed(f"cuInit answers {report.cuda_init}: {meaning} ({report.libcuda})", todo)
    if problem := report.problems.get("cuda"):
        return failed(f"{report.libcuda} loads, but {problem}", "look into the host's dmesg for Xid lines")
    return passed(f"{report.libcuda}, cuInit succeeds")


def forward_compat(seen: Seen) -> Finding:
    """NVIDIA's forward-compatibility libraries: fine on data center boards, error 804 on GeForce and RTX ones.

    Public report: https://github.com/huggingface/candle/issues/3358
    """
    found = _compat_directories(seen.environment)
    loaded = seen.gpus.libcuda
    if loaded and "/compat" in loaded:
        found = [f"{loaded} is loaded", *found]
    if not found:
        return passed("none on the loader's path")
    todo = "take the directory out of LD_LIBRARY_PATH and /etc/ld.so.conf.d, then run ldconfig"
    boards = [gpu.name for gpu in seen.gpus.gpus if (gpu.capability or "").startswith("12.")]
    if boards or seen.gpus.cuda_init == 804:
        return failed(f"{'; '.join(found)}: breaks {', '.join(boards) or 'this board'} (error 804)", todo)
    return warned(f"{'; '.join(found)}: breaks GeForce and RTX boards (error 804)", todo)


def _compat_directories(environment: Mapping[str, str]) -> list[str]:
    """Directories with a libcuda of their own named .../compat, on LD_LIBRARY_PATH or in the loader's configuration."""
    path = environment.get("LD_LIBRARY_PATH", "")
    places = [(directory, "LD_LIBRARY_PATH") for directory in path.split(":") if directory]
    for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        places += [(line.strip(), str(file)) for line in lines if line.strip().startswith("/")]
    return [
        f"{directory} (from {source})"
        for directory, source in places
        if "compat" in Path(directory).name and any(Path(directory).glob("libcuda.so*"))
    ]


def gpus(seen: Seen) -> Finding:
    """Which GPUs a job would see, and whether CUDA_VISIBLE_DEVICES hides some."""
    if left := _not_judged(seen):
        return left
    report = seen.gpus
    hidden = seen.environment.get("CUDA_VISIBLE_DEVICES")
    nodes = sorted(name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    if not report.gpus:
        if hidden is not None and (report.by_nvml or nodes):
            return failed(
                f"{len(report.by_nvml or nodes)} GPUs are here, but CUDA_VISIBLE_DEVICES={hidden!r} leaves none",
                "unset CUDA_VISIBLE_DEVICES or name GPUs that are there",
            )
        return failed(f"no GPU is visible ({len(nodes)} /dev/nvidia* nodes)", START_WITH_GPUS)
    text = ", ".join(_describe(gpu) for gpu in report.gpus)
    if report.by_nvml is not None and len(report.gpus) < len(report.by_nvml):
        return passed(f"{len(report.gpus)} of {len(report.by_nvml)} (CUDA_VISIBLE_DEVICES={hidden}): {text}")
    return passed(f"{len(report.gpus)}: {text}")


def _describe(gpu: Gpu) -> str:
    memory = f", {gpu.memory_total / 2**30:.0f} GiB" if gpu.memory_total else ""
    return f"{gpu.name} ({gpu.capability or 'capability unknown'}{memory})"


def capability(seen: Seen) -> Finding:
    """Each GPU's compute capability against the image's set. Code runs within one major version, from its minor on."""
    if left := _not_judged(seen):
        return left
    built = [str(text) for text in (seen.facts or {}).get("capabilities", ())]
    if not built:
        return skipped("the image names no capabilities")
    if not seen.gpus.gpus:
        return skipped(f"no GPU to compare with {', '.join(built)}")
    wrong, inherited = [], []
    for gpu in seen.gpus.gpus:
        if gpu.capability is None or gpu.capability in built:
            continue
        base = _runs_on(gpu.capability, built)
        if base is None:
            wrong.append(f"{gpu.name} has {gpu.capability}")
        else:
            inherited.append(f"{gpu.capability} runs the code for {base}; Triton compiles its kernels for it once")
    if wrong:
        return failed(
            f"{'; '.join(sorted(set(wrong)))}: this image holds code for {', '.join(built)} only, "
            "and code runs within one major version",
            "use a GPU of these capabilities, or build an image for this one (builder build --capability ...)",
        )
    return passed("; ".join(sorted(set(inherited))) or f"in the image's set ({', '.join(built)})")


def _runs_on(capability: str, built: Iterable[str]) -> str | None:
    """The best capability in `built` whose machine code runs on a GPU of `capability`: same major, minor not above."""
    major, minor = _numbers(capability)
    fitting = [numbers for numbers in map(_numbers, built) if numbers[0] == major and numbers[1] <= minor]
    return ".".join(map(str, max(fitting))) if fitting else None


def card(seen: Seen) -> Finding:
    """Inductor's cache is keyed by the card's name, as the driver spells it."""
    if left := _not_judged(seen):
        return left
    warm = [str(name) for name in (seen.facts or {}).get("cards", ())]
    names = sorted({gpu.name for gpu in seen.gpus.gpus})
    if not names:
        return skipped("no GPU")
    cold = [name for name in names if name not in warm]
    if cold:
        return warned(
            f"torch.compile is not warm for {', '.join(cold)} (warm: {', '.join(warm) or 'none'})",
            "the first step compiles; `blackwell warm` fills the cache for this card",
        )
    return passed(f"torch.compile is warm for {', '.join(names)}")


def nvidia_variables(seen: Seen) -> Finding:
    """The variables by which NVIDIA's container runtime decides what to mount."""
    visible = seen.environment.get("NVIDIA_VISIBLE_DEVICES")
    capabilities = seen.environment.get("NVIDIA_DRIVER_CAPABILITIES")
    todo = "set NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=compute,utility, as the image does"
    if visible is None or capabilities is None:
        missing = [
            name
            for name, value in (("NVIDIA_VISIBLE_DEVICES", visible), ("NVIDIA_DRIVER_CAPABILITIES", capabilities))
            if value is None
        ]
        return warned(f"{' and '.join(missing)} not set: without them no GPU appears in this base", todo)
    if visible.strip() in ("", "void", "none") and seen.judge_gpu:
        text = f"NVIDIA_VISIBLE_DEVICES={visible!r} asks for no GPU"
        if seen.gpus.gpus:  # device plugins that mount the GPUs themselves (CDI) set "void"
            return passed(f"{text}, but GPUs are there (mounted through CDI)")
        return failed(text, todo)
    granted = {word.strip() for word in capabilities.split(",")}
    if "all" not in granted and (lacking := {"compute", "utility"} - granted):
        return failed(f"NVIDIA_DRIVER_CAPABILITIES={capabilities!r} lacks {', '.join(sorted(lacking))}", todo)
    return passed(f"NVIDIA_VISIBLE_DEVICES={visible}, NVIDIA_DRIVER_CAPABILITIES={capabilities}")


def preload(seen: Seen) -> Finding:
    """A null GPU, or a library that isn't there, preloaded into this job."""
    environment = seen.environment
    on = null_gpu(environment)
    if on:
        return failed(
            f"the null GPU is on ({on}): nothing that is computed here is real",
            "unset it; only `blackwell warm` may set it",
        )
    if left := [name for name in ("NULLGPU_ON", "NULLGPU_CARD") if environment.get(name)]:
        return warned(f"{' and '.join(left)} set, left over from a null GPU that isn't preloaded here", "unset it")
    names = [name for name in re.split(r"[\s:]+", environment.get("LD_PRELOAD", "")) if name]
    absent = [name for name in names if "/" in name and not os.path.exists(name)]
    if absent:
        return warned(f"LD_PRELOAD names {', '.join(absent)}, which isn't there", "correct or unset LD_PRELOAD")
    return passed(f"LD_PRELOAD={':'.join(names)}" if names else "nothing is preloaded")
