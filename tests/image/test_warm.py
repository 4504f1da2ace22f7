"""The proof without a GPU: in a fresh container of the image the step compiles nothing for any of its cards, and can be caught doing so.

Another user than the one who built, a read-only root with a writable /tmp, and no C compiler to be found.
"""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from builder.engine import docker
from tests.image.conftest import ROOT, BuiltImage, RunIn

CARDS = ROOT / "builder" / "inside" / "blackwell" / "cards"
SOMEBODY = "23456:23456"
COLD = 3  # exit code of `blackwell step --expect-warm` at a miss
MARK = "-- step ends --"

# PATH holds Python and our commands and no compiler while the step runs. `file` stays where it is installed: Triton's keys for its C
# modules hold platform.architecture(), and that is what `file` says of the interpreter.
STEP = f"""
mkdir -p /tmp/bin; [ -x /usr/bin/file ] && ln -s /usr/bin/file /tmp/bin/file
env PATH=/opt/venv/bin:/tmp/bin HOME=/tmp blackwell step --device null --card "$CARD" --expect-warm --json; code=$?
echo; echo '{MARK}' $code
find /tmp /var/tmp -path '*blackwell-*' -type f ! -name .overlay-of
"""


def step(
    run_in: RunIn,
    image: BuiltImage,
    card: str,
    *,
    before: str = "",
    root: bool = False,
    env: dict[str, str] | None = None,
    mounts: tuple[str, ...] = (),
) -> tuple[int, dict[str, Any], list[str], str]:
    """Exit code, report, files that the caches gained, stderr."""
    done = run_in(
        image.reference,
        "-c",
        before + STEP,
        entrypoint="/bin/sh",
        user=None if root else SOMEBODY,
        read_only=not root,
        tmpfs=("/tmp",),
        env={"CARD": card, **(env or {})},
        mounts=mounts,
        timeout=600,
    )
    report, _, rest = done.stdout.partition(MARK)
    code, *gained = rest.split()
    return int(code), json.loads(report), gained, done.stderr


def first_card(image: BuiltImage) -> str:
    return str(image.facts["cards"][0])


def profile(card: str) -> str:
    """The text of a card's profile."""
    return next(text for path in CARDS.glob("*.toml") if tomllib.loads(text := path.read_text())["name"] == card)


KERNEL = "l2norm_fwd_kernel"  # FLA's; every run of the step launches it


def reasons(
    run_in: RunIn, image: BuiltImage, *options: str, env: dict[str, str] | None = None, mounts: tuple[str, ...] = ()
) -> str:
    """What `kernels explain` says of the same container."""
    card = first_card(image)
    capability = tomllib.loads(profile(card))["attributes"]
    words = (
        "--card",
        card,
        "--capability",
        f"{capability['compute_capability_major']}.{capability['compute_capability_minor']}",
        *options,
    )
    done = run_in(
        image.reference, "blackwell", "kernels", "explain", KERNEL, "--json", *words, user=SOMEBODY, env=env, mounts=mounts, timeout=300
    )  # fmt: skip
    return "\n".join(json.loads(done.stdout)["reasons"])


def test_nothing_to_explain_when_warm(image: BuiltImage, run_in: RunIn) -> None:
    """Of everything that can be compared, nothing differs; a launch's own specialization is left to be compared by hand."""
    assert reasons(run_in, image).startswith("no part of")


def test_every_card_is_warm(image: BuiltImage, run_in: RunIn) -> None:
    assert image.facts["cards"], "the image names no cards"
    for card in image.facts["cards"]:
        code, report, gained, errors = step(run_in, image, card)
        assert code == 0, (card, report, errors)
        assert f"null GPU: {card} (" in errors, "it says that it is on"
        assert report["card"] == card
        assert (report["misses"], report["graphs"]["fx_miss"], report["graphs"]["autograd_miss"]) == (0, 0, 0), card
        assert report["hits"] > 0 and report["graphs"]["fx_hit"] > 0, (
            f"{card}: nothing was asked for, so nothing is shown"
        )
        assert gained == [], card


def test_every_default_run_is_warm(image: BuiltImage, run_in: RunIn) -> None:
    """Both shapes, packed and not."""
    done = run_in(
        image.reference, "blackwell", "warm", "--check", "--card", first_card(image), "--json", user=SOMEBODY, read_only=True, tmpfs=("/tmp",), timeout=1200
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == 4


def test_a_removed_entry_is_counted(image: BuiltImage, run_in: RunIn) -> None:
    remove = """
python - <<'END'
import json, os, pathlib, shutil
cache = pathlib.Path(os.environ["BLACKWELL_CACHE"])
report = json.loads((cache / "report.json").read_text())
kernel = next(k for k in report["kernels"] if k["kernel"] == "l2norm_fwd_kernel" and "toy/toy" in k["runs"])
for entry in report["kernels"]:
    if entry["kernel"] == kernel["kernel"]:
        shutil.rmtree(cache / "triton" / entry["directory"])
END
"""
    code, report, _, _ = step(run_in, image, first_card(image), before=remove, root=True)
    assert code == COLD
    assert "l2norm" in report["error"]


@pytest.mark.parametrize("variable", ["DISABLE_PTXAS_OPT", "TRITON_DISABLE_LINE_INFO"])
def test_a_changed_variable_of_the_key_is_counted(image: BuiltImage, run_in: RunIn, variable: str) -> None:
    code, report, _, _ = step(run_in, image, first_card(image), env={variable: "1"})
    assert code == COLD, report
    assert variable in reasons(run_in, image, env={variable: "1"})


def test_another_assembler_is_counted(image: BuiltImage, run_in: RunIn, tmp_path: Path) -> None:
    site = f"/opt/venv/lib/{image.python}/site-packages"
    other = tmp_path / "ptxas"
    other.write_text(
        f"#!/bin/sh\nreal={site}/triton/backends/nvidia/bin/ptxas-blackwell\n"
        'case "$*" in *--version*) $real --version | /bin/sed "s/V[0-9][0-9.]*/V12.9.1/";; *) exec $real "$@";; esac\n'
    )
    other.chmod(0o755)
    env, mounts = {"TRITON_PTXAS_BLACKWELL_PATH": "/opt/ptxas"}, (f"{other}:/opt/ptxas:ro",)
    code, report, _, _ = step(run_in, image, first_card(image), env=env, mounts=mounts)
    assert code == COLD, report
    assert "12.9.1" in reasons(run_in, image, env=env, mounts=mounts)


def test_another_card_of_the_same_chip_is_counted(image: BuiltImage, run_in: RunIn, tmp_path: Path) -> None:
    """Triton's kernels hit, Inductor's graphs do not: their key has the card's name."""
    card = first_card(image)
    (tmp_path / "other.toml").write_text(profile(card).replace(f'name = "{card}"', 'name = "NVIDIA Something Else"'))
    tmp_path.chmod(0o755)
    code, report, _, _ = step(
        run_in,
        image,
        "NVIDIA Something Else",
        env={"BLACKWELL_CARDS": "/opt/cards"},
        mounts=(f"{tmp_path}:/opt/cards:ro",),
    )
    assert code == COLD
    assert "flex_attention" in report["error"] or "triton_" in report["error"], report
    assert "NVIDIA Something Else" in reasons(run_in, image, "--card", "NVIDIA Something Else")


TRAIN = """
import torch, triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 1024}, num_warps=4)], key=["n"])
@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda())
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64, device="cuda")
y = torch.empty_like(x)
for _ in range(2):
    scale[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    model(y).square().mean().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.slow
def test_a_users_own_script_in_three_lines(
    image: BuiltImage, run_in: RunIn, engine: docker.Engine, tmp_path: Path
) -> None:
    card = first_card(image)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "Dockerfile").write_text(
        f'FROM {image.reference}\nCOPY train.py .\nRUN blackwell warm --card "{card}" -- python train.py\n'
    )
    tag = f"blackwell-test-warm:{tmp_path.name.lower()}"
    client = shutil.which(str(engine.client)) or str(engine.client)
    built = subprocess.run(
        [client, "build", "-q", "-t", tag, str(tmp_path)], capture_output=True, text=True, timeout=1800, check=False
    )
    assert built.returncode == 0, built.stderr
    try:
        check = ("blackwell", "warm", "--check", "--card", card, "--json", "--", "python", "train.py")
        options: dict[str, Any] = {"user": SOMEBODY, "read_only": True, "tmpfs": ("/tmp",), "timeout": 600}
        left = run_in(
            tag, "-c", "find / -xdev -name 'blackwell-*' -not -path '/opt/*' -not -path '/proc/*'", entrypoint="/bin/sh"
        )
        assert left.stdout == "", "warming leaves nothing besides the cache"
        warm = run_in(tag, *check, **options)
        assert warm.returncode == 0, warm.stderr
        assert f"null GPU: {card} (" in warm.stderr, "it says that it is on"
        assert json.loads(warm.stdout)["kernels_found"] > 0
        cold = run_in(image.reference, *check[:-1], "/mnt/train.py", mounts=(f"{tmp_path}:/mnt:ro",), **options)
        assert cold.returncode != 0, "the image it was made from does not know this script"
    finally:
        subprocess.run([client, "rmi", tag], capture_output=True, check=False)
