"""Module loading: resources come from the cubin, and what the card would refuse is refused with the card's error codes.

The expected numbers were compared with a real H200's answers (NVIDIA driver 580.159) for the same cubins on 2026-12-01: all equal.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from nullgpu_helper import needs_compiler, run_under

triton = pytest.importorskip("triton")
ASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"

PTX = """
.version 8.0
.target {target}
.address_size 64
.shared .align 16 .b8 buffer[2048];
.const .align 4 .b8 table[100];
.visible .entry plain(.param .u64 p)
{{ .reg .b64 %d<2>; .reg .b32 %r<2>; ld.param.u64 %d1,[p]; mov.u32 %r1,%tid.x; st.global.u32 [%d1],%r1; ret; }}
.visible .entry required(.param .u64 p) .reqntid 128,2,1
{{ .reg .b64 %d<2>; .reg .b32 %r<2>; ld.param.u64 %d1,[p]; mov.u32 %r1,%tid.x; st.global.u32 [%d1],%r1; ret; }}
.visible .entry bounded(.param .u64 p) .maxntid 256
{{ .reg .b64 %d<2>; .reg .b32 %r<2>; ld.param.u64 %d1,[p]; mov.u32 %r1,%tid.x; st.global.u32 [%d1],%r1; ret; }}
.visible .entry shared(.param .u64 p)
{{ .reg .b64 %d<2>; .reg .b32 %r<6>; ld.param.u64 %d1,[p]; mov.u32 %r1,%tid.x; mov.u32 %r2,buffer; shl.b32 %r3,%r1,2; add.u32 %r2,%r2,%r3;
   st.shared.u32 [%r2],%r1; bar.sync 0; ld.shared.u32 %r3,[buffer+4]; ld.const.u32 %r4,[table+8]; add.u32 %r3,%r3,%r4; st.global.u32 [%d1],%r3; ret; }}
.visible .entry stack(.param .u64 p)
{{ .local .align 8 .b8 area[512]; .reg .b64 %d<6>; .reg .b32 %r<6>; ld.param.u64 %d1,[p]; mov.u32 %r1,%tid.x; mov.u64 %d2,area; and.b32 %r2,%r1,63;
   mul.wide.u32 %d3,%r2,8; add.u64 %d4,%d2,%d3; st.local.u32 [%d4],%r1; ld.global.u32 %r3,[%d1]; and.b32 %r3,%r3,63; mul.wide.u32 %d3,%r3,8;
   add.u64 %d4,%d2,%d3; ld.local.u32 %r4,[%d4]; st.global.u32 [%d1],%r4; ret; }}
"""

# Runs under the null GPU, without torch: loads each cubin and prints what the driver API says of it.
PROBE = """
import ctypes, json, sys
c = ctypes.CDLL("libcuda.so.1")
c.nullgpu_truth_loaded()
c.cuInit(0)
context = ctypes.c_void_p()
c.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
c.cuCtxSetCurrent(context)
answers = {}
for path in sys.argv[1:]:
    module = ctypes.c_void_p()
    answer = answers[path.rpartition("/")[2]] = {"load": c.cuModuleLoadData(ctypes.byref(module), open(path, "rb").read() + b"\\0")}
    if answer["load"]:
        continue
    for name in ("plain", "required", "bounded", "shared", "stack", "absent"):
        f = ctypes.c_void_p()
        status = c.cuModuleGetFunction(ctypes.byref(f), module, name.encode())
        if status:
            answer[name] = status
            continue
        values, v = {}, ctypes.c_int()
        for attribute in range(10):
            values[attribute] = v.value if c.cuFuncGetAttribute(ctypes.byref(v), attribute, f) == 0 else None
        occupancy = {}
        for threads in (32, 256, 1024):
            c.cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(v), f, threads, ctypes.c_size_t(20000))
            occupancy[threads] = v.value
        launch = lambda grid, block, shared=0: c.cuLaunchKernel(f, *grid, *block, shared, None, None, None)
        launches = [launch((1, 1, 1), (n, 1, 1)) for n in (0, 128, 256, 257, 1024, 1025)] + [launch((1, 1, 1), (128, 2, 1))]
        launches += [launch((0, 1, 1), (128, 2, 1)), launch((1, 65536, 1), (1, 1, 1)), launch((1, 1, 1), (1, 1, 65))]
        opt_in = ctypes.c_int()
        c.cuDeviceGetAttribute(ctypes.byref(opt_in), 97, 0)
        sets = [c.cuFuncSetAttribute(f, 8, opt_in.value - values[1] + more) for more in (1, 0)]
        after = [launch((1, 1, 1), (128, 2, 1), opt_in.value - values[1] + more) for more in (0, 1)]
        answer[name] = {"values": values, "occupancy": occupancy, "launches": launches, "sets": sets, "after": after}
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of cubins, named by their target."""
    if not ASSEMBLER.is_file() or not shutil.which("gcc"):
        pytest.skip("no ptxas-blackwell in this Triton")
    directory = tmp_path_factory.mktemp("cubins")
    for target in (
        "sm_80",
        "sm_90",
        "sm_90a",
        "sm_100",
        "sm_100a",
        "sm_100f",
        "sm_103",
        "sm_103a",
        "sm_120",
        "sm_120a",
        "sm_120f",
        "sm_121",
        "sm_121a",
    ):
        version = "8.8" if target[3:] >= "100" and len(target) > 5 else "8.0"
        (directory / f"{target}.ptx").write_text(PTX.format(target=target).replace("8.0", version, 1))
        subprocess.run(
            [ASSEMBLER, f"-arch={target}", directory / f"{target}.ptx", "-o", directory / f"{target}.cubin"], check=True
        )
    return directory


def answers(card: str, cubins: Path, pattern: str = "*.cubin") -> dict[str, dict]:
    said = run_under(card, ["-c", PROBE, *(str(path) for path in sorted(cubins.glob(pattern)))])
    assert "ANSWERS" in said, said
    return json.loads(said.partition("ANSWERS")[2])


@needs_compiler
@pytest.mark.parametrize(
    ("card", "runs"),
    [
        ("NVIDIA H200", {"sm_90", "sm_90a"}),
        ("NVIDIA B200", {"sm_100", "sm_100a", "sm_100f"}),
        ("NVIDIA B300 SXM6 AC", {"sm_100", "sm_100f", "sm_103", "sm_103a"}),
        ("NVIDIA GeForce RTX 5090", {"sm_120", "sm_120a", "sm_120f"}),
        ("NVIDIA GB10", {"sm_120", "sm_120f", "sm_121", "sm_121a"}),
    ],
)
def test_only_fitting_cubins_load(card: str, runs: set[str], cubins: Path) -> None:
    loads = {name.removesuffix(".cubin"): answer["load"] for name, answer in answers(card, cubins).items()}
    assert {name for name, status in loads.items() if status == 0} == runs
    assert {status for name, status in loads.items() if name not in runs} == {209}  # CUDA_ERROR_NO_BINARY_FOR_GPU


@needs_compiler
@pytest.mark.parametrize(("card", "target"), [("NVIDIA H200", "sm_90a"), ("NVIDIA GeForce RTX 5090", "sm_120a")])
def test_resources_are_the_cubins(card: str, target: str, cubins: Path) -> None:
    answer = answers(card, cubins, f"{target}.cubin")[f"{target}.cubin"]
    names = ("plain", "required", "bounded", "shared", "stack")
    values = {name: {int(k): v for k, v in answer[name]["values"].items()} for name in names}
    assert [values[n][0] for n in names] == [1024, 1024, 256, 1024, 1024]  # most threads of a block
    assert [values[n][1] for n in names] == [0, 0, 0, 2048, 0]  # static shared bytes
    assert [values[n][2] for n in names] == [100] * 5  # constant bytes of the module
    assert [values[n][3] for n in names] == [0, 0, 0, 0, 512]  # local bytes a thread
    assert all(4 <= values[n][4] <= 32 for n in names)  # registers: the assembler's choice
    assert [values[n][8] for n in names] == [49152, 49152, 49152, 47104, 49152]  # dynamic shared limit before opting in
    assert answer["absent"] == 500  # CUDA_ERROR_NOT_FOUND


@needs_compiler
def test_launch_limits_are_the_cards(cubins: Path) -> None:
    answer = answers("NVIDIA GeForce RTX 5090", cubins, "sm_120a.cubin")["sm_120a.cubin"]
    # threads 0, 128, 256, 257, 1024, 1025; block 128x2; grid 0, grid y 65536, block z 65
    assert answer["plain"]["launches"] == [1, 0, 0, 0, 0, 1, 0, 1, 1, 1]
    assert answer["required"]["launches"] == [1, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert answer["bounded"]["launches"] == [1, 0, 0, 1, 1, 1, 0, 1, 1, 1]
    for name in ("plain", "shared"):
        assert answer[name]["sets"] == [1, 0], "opting in above the card's limit less the static part fails"
        assert answer[name]["after"] == [0, 1], "and so does a launch above the limit that was set"


@needs_compiler
def test_occupancy_counts_threads_shared_memory_and_blocks(cubins: Path) -> None:
    def plain(card: str, target: str) -> dict[str, int]:
        return answers(card, cubins, f"{target}.cubin")[f"{target}.cubin"]["plain"]["occupancy"]

    assert plain("NVIDIA H200", "sm_90") == {"32": 11, "256": 8, "1024": 2}  # by shared memory, by threads
    assert plain("NVIDIA GeForce RTX 5090", "sm_120") == {"32": 4, "256": 4, "1024": 1}


@needs_compiler
def test_damaged_modules_are_refused(cubins: Path, tmp_path: Path) -> None:
    (tmp_path / "rubbish.cubin").write_bytes(b"rubbish" * 100)
    (tmp_path / "empty.cubin").write_bytes(b"\x7fELF" + bytes(400))
    assert {a["load"] for a in answers("NVIDIA GeForce RTX 5090", tmp_path).values()} == {801, 200}
