"""Facts about the GPUs and the NVIDIA driver, from NVML, from libcuda and from /proc, each allowed to be missing.

`look` may block for as long as a sick driver likes: call it in a bounded child.
"""

import ctypes
import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COMPUTE_CAPABILITY_MAJOR = 75
"""CUdevice_attribute of the compute capability's first number; the second number's is 76."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Memory in bytes, utilization in percent; None where the source doesn't say."""

    index: int
    name: str
    capability: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """What each source says. `by_nvml` has all GPUs of the container, `by_cuda` those of CUDA_VISIBLE_DEVICES.

    `cuda_init` is what cuInit answered (0 = success, None = not called), `libcuda` the file that was really loaded.
    """

    driver: str | None = None
    driver_source: str = ""
    by_nvml: tuple[Gpu, ...] | None = None
    by_cuda: tuple[Gpu, ...] | None = None
    cuda_init: int | None = None
    libcuda: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    """Source -> why it had no answer."""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs a job would use: CUDA's view where there is one, else NVML's."""
        return self.by_cuda if self.by_cuda is not None else self.by_nvml or ()


def look(report: Callable[[Any], None]) -> None:
    """Report a growing GpuReport after each source: what was found before a hang or crash is kept."""
    seen = GpuReport()
    for source in (_proc, _nvml, _cuda):
        try:
            seen = source(seen)
        except Exception as problem:  # a source that fails is a fact about this machine, not an error
            seen = replace(seen, problems={**seen.problems, source.__name__.lstrip("_"): str(problem)})
        report(seen)


def _proc(seen: GpuReport) -> GpuReport:
    """The driver's version as the kernel module tells it: needs no library."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        path = Path("/sys/module/nvidia/version")
        return replace(seen, driver=path.read_text().strip(), driver_source=str(path))
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    if match is None:
        raise ValueError(f"/proc/driver/nvidia/version has no version in it: {text[:80]!r}")
    return replace(seen, driver=match[1], driver_source="/proc/driver/nvidia/version")


def _nvml(seen: GpuReport) -> GpuReport:
    """Through nvidia-ml-py, which is locked into every image."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                Gpu(
                    index=index,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    capability=f"{major}.{minor}",
                    memory_total=int(memory.total),
                    memory_used=int(memory.used),
                    utilization=_utilization(nvml, handle),
                )
            )
        version = _text(nvml.nvmlSystemGetDriverVersion())
        source = {} if seen.driver else {"driver": version, "driver_source": "NVML"}
        return replace(seen, by_nvml=tuple(found), **source)  # type: ignore[arg-type]
    finally:
        nvml.nvmlShutdown()


def _utilization(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:  # MIG slices and some virtual GPUs don't tell
        return None


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _cuda(seen: GpuReport) -> GpuReport:
    """Through the libcuda that a job would load."""
    cuda = ctypes.CDLL("libcuda.so.1")
    path = _mapped("libcuda.so")
    seen = replace(seen, libcuda=path)
    version = re.search(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)*)$", path or "")
    if version and not seen.driver:
        seen = replace(seen, driver=version[1], driver_source=f"the name of {path}")
    seen = replace(seen, cuda_init=int(cuda.cuInit(0)))
    if seen.cuda_init != 0:
        return seen
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return replace(seen, by_cuda=tuple(_cuda_gpu(cuda, index) for index in range(count.value)))


def _cuda_gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    numbers = []
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MAJOR + 1):
        number = ctypes.c_int()
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device), "cuDeviceGetAttribute")
        numbers.append(str(number.value))
    return Gpu(index=index, name=_text(name.value), capability=".".join(numbers), memory_total=total.value)


def _check(code: int, call: str) -> None:
    if code != 0:
        raise OSError(f"{call} answered {code}")


def _mapped(part: str) -> str | None:
    """The real file behind a loaded library."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and part in os.path.basename(fields[5]):
                return fields[5].strip()
    return None
