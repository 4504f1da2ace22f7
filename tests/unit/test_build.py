"""BuildKit's output becomes progress and times; a failure becomes one sentence with the failing step's last lines."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from builder import build, flow, plan
from builder.errors import BudgetError, BuildError, CommandError, HashMismatchError, NetworkError
from builder.values import Image

OUTPUT = """\
#1 [internal] load build definition from Dockerfile
#1 DONE 0.1s
#7 [libraries 2/4] RUN --mount=type=secret,id=network     sh /opt/build/install/install.sh /opt/layer
#7 0.5 Resolved 4 packages
#7 DONE 22.9s
#8 [libraries 3/4] RUN sh x
#8 CACHED
#9 [warm 1/1] RUN blackwell warm --image
#9 3.1 warm: NVIDIA B200
#9 DONE 60.0s
"""


def test_progress_says_each_step_once_and_adds_up_seconds_by_stage() -> None:
    said: list[str] = []
    progress = build.Progress(say=said.append)
    for line in (OUTPUT + OUTPUT.split("\n")[2]).splitlines():
        progress.line(line)
    assert len([s for s in said if s.startswith("libraries: ")]) == 2
    assert not any("--mount" in s or "internal" in s for s in said)
    assert progress.seconds == {"libraries": 22.9, "warm": 60.0}


def test_progress_passes_on_what_a_long_step_tells_of_itself() -> None:
    """Warming takes minutes: its count of finished runs must not stay in the log file."""
    said: list[str] = []
    progress = build.Progress(say=said.append)
    told = "blackwell warm [3/24] NVIDIA B200, toy/toy-packed: 27 kernels compiled, 25 found; 0 graphs compiled, 3 found; 28 s"
    slow = "Building wheel for causal_conv1d (pyproject.toml): still running..."
    for line in (f"#21 82.94 {told}", "#21 83.0 some other line", f"#11 90.11   {slow}"):
        progress.line(line)
    assert said == [told, slow]


def test_progress_names_the_layer_that_a_step_installs() -> None:
    said: list[str] = []
    mount = "RUN --mount=type=bind,source=layers/cudnn,target=/opt/layer     . /opt/build/install/network.sh && "
    for line in (
        f"#7 [libraries 3/5] {mount}sh /opt/build/install/install.sh /opt/layer",
        f"#8 [extensions-compile 2/2] {mount}sh /opt/build/extensions/extensions.sh /opt/layer /wheels",
    ):
        build.Progress(say=said.append).line(line)
    assert said[0] == "libraries: installing cudnn"
    assert "extensions.sh" in said[1]


def failing(text: str) -> CommandError:
    lines = "".join(f"#7 {i}.0 {line}\n" for i, line in enumerate(text.splitlines()))
    return CommandError(
        ("docker", "build"), 1, OUTPUT + lines + "#7 ERROR: executor failed running [/bin/sh -c x]: exit code: 2\n"
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("error: Hash mismatch for `torch==2.12.1`", HashMismatchError),
        ("error: Failed to fetch: `https://x/`", NetworkError),
        ("cause: dns error", NetworkError),
        ("gcc: internal compiler error", BuildError),
    ],
)
def test_a_failure_names_its_cause_and_shows_the_failing_step(text: str, kind: type[BuildError]) -> None:
    error = build._explain(failing("first line\n" + text), Path("/x/build.log"))
    assert type(error) is kind
    assert text in error.message and "warm: NVIDIA B200" not in error.message
    assert "/x/build.log" in error.hint


def test_a_full_disk_is_said() -> None:
    error = build._explain(CommandError(("docker",), 1, "write /x: no space left on device"), Path("/x"))
    assert "disk is full" in error.message


@pytest.fixture
def image() -> Image:
    return flow.choose(flow.Project.find(), plan.Request(triton="3.7"))


def test_an_image_over_its_budget_fails(image: Image) -> None:
    build.check_budget(image, 10**9, 10**9)
    with pytest.raises(BudgetError, match=r"1\.10 GB.*1\.00 GB"):
        build.check_budget(image, 11 * 10**8, 10**9)
    own = replace(image, stack=replace(image.stack, budget_zstd_bytes=2 * 10**9))
    build.check_budget(own, 11 * 10**8, 10**9)
    with pytest.raises(BudgetError, match=r"2\.10 GB.*2\.00 GB"):
        build.check_budget(own, 21 * 10**8, 10**9)


def test_the_wheel_key_depends_on_what_goes_into_a_wheel_and_on_nothing_else(image: Image) -> None:
    project = flow.Project.find()
    locked = flow.read_lock(project, image)
    key = flow.work_of(project, image, locked).wheel_key("flags")

    def changed(layer: str) -> str:
        parts = tuple(replace(d, version="0") if d.layer == layer else d for d in locked.distributions)
        return flow.work_of(project, image, replace(locked, distributions=parts)).wheel_key("flags")

    assert {changed(layer) != key for layer in ("extensions", "compiler", "torch", "cuda")} == {True}
    assert {changed(layer) == key for layer in ("fla", "python", "triton")} == {True}
    assert flow.work_of(project, image, locked).wheel_key("other flags") != key
    assert flow.work_of(project, image, replace(locked, debian=locked.debian[1:])).wheel_key("flags") != key


def test_inputs_change_with_everything_that_goes_in(image: Image) -> None:
    project = flow.Project.find()
    locked = flow.read_lock(project, image)
    work = flow.work_of(project, image, locked)
    assert work.inputs == flow.work_of(project, image, locked).inputs
    assert work.inputs != replace(work, files={**work.files, "Dockerfile": "FROM other"}).inputs
    assert work.inputs != replace(work, inside=project.scripts).inputs


def test_what_tools_leave_in_a_tree_is_no_input(image: Image, tmp_path: Path) -> None:
    """A type checker's cache or an editor's swap file must not cost a build, nor get into an image."""
    project = flow.Project.find()
    work = flow.work_of(project, image, flow.read_lock(project, image))
    inside = tmp_path / "inside"
    shutil.copytree(work.inside, inside)
    copied = replace(work, inside=inside)
    for by_product in (".mypy_cache/3.11/x.json", "blackwell/__pycache__/cli.pyc", "blackwell/.cli.py.swp"):
        (inside / by_product).parent.mkdir(parents=True, exist_ok=True)
        (inside / by_product).write_text("left by a tool")
    assert copied.inputs == work.inputs
    uv = tmp_path / "uv"
    uv.touch()
    build.write_context(tmp_path / "context", copied, None, uv)
    names = {path.name for path in (tmp_path / "context").rglob("*")}
    assert "cli.py" in names and not names & {".mypy_cache", "x.json", "cli.pyc", ".cli.py.swp"}
    (inside / "blackwell" / "more.py").write_text("")
    assert copied.inputs != work.inputs
