"""After a build: the report's page, differences between images, file trees of layers, the bake file."""

import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from click.testing import CliRunner

from builder import arch, bake, diff, flow, lock, plan, report, sbom, show
from builder.cli import cli
from builder.engine import contents
from builder.engine.contents import Contents, Entry
from builder.engine.sizes import Layer
from builder.values import Matrix
from builder.verify import TestResult as Result
from builder.verify import Verdict

DIGEST = "sha256:" + "ab" * 32


def archive(files: Mapping[str, str | None]) -> tarfile.TarFile:
    """A layer: path -> text, None for a directory."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.type = tarfile.DIRTYPE if text is None else tarfile.REGTYPE
            member.size = len(text or "")
            tar.addfile(member, io.BytesIO((text or "").encode()))
    data.seek(0)
    return tarfile.open(fileobj=data)


def test_layers_lie_over_each_other_and_whiteouts_take_away() -> None:
    lower = archive(
        {"./a/": None, "./a/one": "1", "./a/two": "2", "./b/old": "x", "./c": "c", "proc/x": "", "etc/hosts": "h"}
    )
    upper = archive({"a/.wh.two": "", "b/new": "y", "b/.wh..wh..opq": "", "a/one": "11", ".wh.c": ""})
    entries, _ = contents.merge([lower, upper])
    assert sorted(entries) == ["a", "a/one", "b/new"]
    assert entries["a/one"].size == 2 and entries["a"].kind == "directory"


def test_texts_are_kept_and_go_with_their_file() -> None:
    path = "usr/share/doc/bash/copyright"
    lower = archive(
        {
            path: "GPL",
            "opt/blackwell/image.json": "{}",
            "opt/blackwell/cache/0a/report.json": "[]",
            "usr/share/doc/x": "no",
        }
    )
    _, texts = contents.merge([lower])
    assert sorted(texts) == ["opt/blackwell/cache/0a/report.json", "opt/blackwell/image.json", path]
    _, after = contents.merge([archive({path: "GPL"}), archive({"usr/share/doc/.wh.bash": ""})])
    assert after == {}


def test_a_copyright_file_that_is_a_link_is_that_of_the_package_it_points_to() -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path, target in (("usr/share/doc/libgcc-s1", "gcc-14-base"), ("usr/share/doc/b/copyright", "../gcc-14-base/copyright"), ("usr/share/doc/c", "/nowhere")):  # fmt: skip
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    data.seek(0)
    with tarfile.open(fileobj=data) as links:
        _, texts = contents.merge([archive({"usr/share/doc/gcc-14-base/copyright": "GPL"}), links])
    assert texts == {f"usr/share/doc/{name}/copyright": "GPL" for name in ("gcc-14-base", "libgcc-s1", "b")}


def contents_of(
    reference: str, files: Mapping[str, str], labels: Mapping[str, str], kernels: Mapping[tuple[str, int], int]
) -> Contents:
    entries = {p: Entry(kind="file", mode=0o644, uid=0, gid=0, size=len(t), digest=t) for p, t in files.items()}
    listed = [{"kernel": name, "target": {"arch": target}} for (name, target), n in kernels.items() for _ in range(n)]
    texts = {p: t for p, t in files.items() if contents.TEXTS.fullmatch(p)}
    texts["opt/blackwell/cache/0a/report.json"] = json.dumps({"kernels": listed})
    return Contents(reference=reference, digest=DIGEST, labels=labels, entries=entries, texts=texts)


def metadata(name: str, version: str) -> dict[str, str]:
    return {f"opt/venv/lib/{name}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n\n"}


BEFORE = contents_of(
    "old",
    {**metadata("torch", "2.11.0"), **metadata("gone", "1"), "var/lib/dpkg/status": "Package: bash\nStatus: x\nVersion: 5.2\n\nPackage: zlib1g\nVersion: 1\n", "big": "x" * 3_000_000},
    {"io.blackwell.version.torch": "2.11.0", "io.blackwell.inputs": "1"},
    {("chunk_fwd", 100): 2, ("lost", 120): 1},
)  # fmt: skip
AFTER = contents_of(
    "new",
    {**metadata("torch", "2.12.1"), **metadata("fresh", "3"), "var/lib/dpkg/status": "Package: bash\nStatus: x\nVersion: 5.3\n\nPackage: zlib1g\nVersion: 1\n", "big": "x" * 1_000_000, "opt/blackwell/cache/0a/triton/HASH/k.cubin": "new"},
    {"io.blackwell.version.torch": "2.12.1", "io.blackwell.inputs": "2"},
    {("chunk_fwd", 100): 5, ("gained", 121): 1},
)  # fmt: skip


def test_a_difference_in_words_for_a_release_note() -> None:
    text = diff.markdown(diff.compare(BEFORE, AFTER))
    for line in (
        "## From `old` to `new`",
        "- torch 2.11.0 → 2.12.1",
        "- gone 1 is gone",
        "- fresh 3 is new",
        "- bash 5.2 → 5.3",
        "- gained 4: chunk_fwd on 10.0 (3), gained on 12.1 (1)",
        "- lost 1: lost on 12.0 (1)",
        "- io.blackwell.version.torch 2.11.0 → 2.12.1",
        "- `/big`: 3.0 → 1.0 MB",
        "- in the kernel cache: 1 new, 0 gone, 0 changed",
        "1.0 MB of files, 2.0 MB less than before.",
    ):
        assert line in text.splitlines(), (line, text)
    assert "zlib1g" not in text and "inputs" not in text and "HASH" not in text
    assert text.index("`/big`") < text.index("`/opt/venv")


def test_empty_files_and_directories_are_new_or_gone_once() -> None:
    """A lock file and a directory have no size: they were counted as new and as gone."""
    nothing = {
        "opt/blackwell/cache/0a/LOCK": replace(BEFORE.entries["big"], size=0),
        "opt/blackwell/cache/0a": replace(BEFORE.entries["big"], kind="dir", size=0),
        "etc/empty": replace(BEFORE.entries["big"], size=0),
    }
    more = replace(BEFORE, entries={**BEFORE.entries, **nothing})
    grown, shrunk = diff.markdown(diff.compare(BEFORE, more)), diff.markdown(diff.compare(more, BEFORE))
    assert "in the kernel cache: 2 new, 0 gone, 0 changed" in grown and "`/etc/empty`: new, 0.0 MB" in grown
    assert "in the kernel cache: 0 new, 2 gone, 0 changed" in shrunk and "`/etc/empty`: gone, 0.0 MB" in shrunk


def test_no_difference_is_said_as_that_and_few_files_are_named() -> None:
    assert "same files and labels" in diff.markdown(diff.compare(BEFORE, replace(BEFORE, reference="copy")))
    assert "and 4 more" in diff.markdown(diff.compare(BEFORE, AFTER), files=1)
    moded = {**BEFORE.entries, "big": replace(BEFORE.entries["big"], mode=0o600)}
    found = diff.compare(BEFORE, replace(BEFORE, entries=moded))
    assert [f.path for f in found.files] == ["big"] and not found.same
    assert json.loads(json.dumps(diff.as_dict(found)))["files"][0]["path"] == "big"


@pytest.fixture(scope="module")
def material(matrix: Matrix) -> report.Material:
    image = plan.resolve(matrix, plan.Request(triton="3.7"))
    path = flow.Project.find().lock_path(image)
    locked = lock.loads(path.read_text(), where=path.name)
    tests = (
        Result(name="test_a", outcome="passed", seconds=0.5),
        Result(name="test_b", outcome="failed", seconds=0.5, reason="<b>it | broke</b>"),
        Result(name="test_c", outcome="skipped", seconds=0, reason="no GPU"),
    )
    kernels = [{"kernel": k, "target": {"arch": a}} for a in (100, 121) for k in ("triton_tem_fused_flex_attention_0", "chunk_fwd_kernel_o", "l2norm_fwd_kernel", "odd")]  # fmt: skip
    layers = [Layer(digest=str(n), size=n * 10**8, compressed={"zstd": n * 4 * 10**7}, created_by="") for n in (5, 10)]
    return report.Material(
        image=image,
        lock=locked,
        digest=DIGEST,
        labels={},
        verdict=Verdict(id=image.id, digest=DIGEST, lock=locked.checksum, tests=tests),
        layers=layers,
        layer_names=["base <one>", "cuda"],
        cards=["NVIDIA B200"],
        warm={"kernels": [*kernels, kernels[1]], "assembler": "ptxas-blackwell 13.1.80"},
        bill=sbom.make(image, locked, DIGEST, {}, "1"),
        benchmark={"rows": [{"program": "toy", "run": "warm", "ok": True, "first_step": 1.5, "second_step": 0.01, "later_steps": None, "report": {"misses": 0}}]},
    )  # fmt: skip


class Page(HTMLParser):
    """Which elements are open, which addresses the page would load, and whether every element is closed."""

    VOID = ("meta", "br", "link", "img", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        self.loads += [v or "" for k, v in attrs if k == "src" or (k == "href" and tag == "link")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_self_contained_and_escaped(material: report.Material) -> None:
    text = report.html(material)
    page = Page()
    page.feed(text)
    assert page.open == [] and page.loads == []
    assert "@import" not in text and "url(" not in text and "<script" not in text
    assert 'name="viewport"' in text
    assert "&lt;b&gt;it | broke&lt;/b&gt;" in text and "<b>it" not in text and "base &lt;one&gt;" in text
    columns, families = report.warm_table(material.warm)
    assert page.svgs == len(columns) * len(families) + len(material.layers)


def test_commands_in_sentences_are_code_on_the_page_and_stay_escaped() -> None:
    made = report.environment(escape=True).from_string("{{ text | code }}").render(text="Run `a <b>` & `c`, don't.")
    assert made == "Run <code>a &lt;b&gt;</code> &amp; <code>c</code>, don&#39;t."


def test_page_and_markdown_tell_the_same(material: report.Material) -> None:
    page, text = report.html(material), report.markdown(material)
    wanted = [material.image.id, DIGEST, "580.65.06", "NVIDIA B200", "failed its tests", "no GPU", "ptxas-blackwell 13.1.80", "1.50", "1,500 MB", "600 MB"]  # fmt: skip
    wanted += [r.id for r in material.image.rules] + [r.url for r in material.image.rules]
    for word in wanted:
        assert word in page and word in text, word
    assert "| gated delta rule | 2 | 1 |" in text and "2 · 1" in page
    assert r"it \| broke" in text
    assert len(material.image.rules) > 2


def test_without_tests_kernels_or_benchmark_the_page_says_so(material: report.Material) -> None:
    bare = replace(material, verdict=None, warm={}, benchmark={}, layers=[], layer_names=[])
    for text in (report.html(bare), report.markdown(bare)):
        assert "not verified" in text and "no report of warm kernels" in text and "Benchmark" not in text


def test_every_family_has_a_pattern_that_fits_something_and_only_results_of_the_bench_are_taken() -> None:
    names = {"triton_per_fused_flex_attention_backward_0", "triton_red_x", "causal_conv1d_fwd_kernel", "chunk_fwd_kernel_o", "l2norm_fwd_kernel", "cross_entropy_kernel", "abc"}  # fmt: skip
    assert {report.family(n) for n in names} == {name for name, _ in report.FAMILIES} | {report.OTHER}
    assert (report.capability(90), report.capability(103)) == ("9.0", "10.3")
    for text in ("[]", '{"rows": 1}', "{"):
        with pytest.raises(ValueError):
            report.read_benchmark(text)
    with pytest.raises(jinja2.UndefinedError):
        report.environment(escape=True).from_string("{{ nothing }}").render()


def test_the_bake_file_grows_with_what_is_known(matrix: Matrix) -> None:
    images = [plan.resolve(matrix, plan.Request(triton=t)) for t in ("3.6", "3.7")]
    common = {"answers": Path("/a"), "epoch": 7, "secrets": {"ca": Path("/s/ca")}}
    first, second = (bake.Job(image=i, context=Path(f"/c/{i.id}"), **common) for i in images)  # type: ignore[arg-type]

    def made(*jobs: bake.Job, **more: str) -> dict[str, Any]:
        return bake.bake(jobs, to="r.example.com/bw", **more)

    assert list(made(first, second)["group"]) == ["fingerprint"]
    assert list(made(replace(first, fingerprint="f"), second)["group"]) == ["fingerprint", "report"]
    whole = replace(first, fingerprint="f", labels={"x": "y"})
    found = made(whole, second, cache="r.example.com/cache")
    assert list(found["group"]) == list(bake.GROUPS) and len(found["group"]["image"]["targets"]) == 1
    target = found["target"][bake.name(images[0])]
    assert target["args"]["GENCODE"] == arch.gencode(images[0].capabilities) and target["args"]["FINGERPRINT"] == "f"
    assert target["tags"] == [f"r.example.com/bw:{images[0].id}"] and target["labels"] == {"x": "y"}
    assert target["cache-from"][0].endswith(images[0].id) and "mode=max" in target["cache-to"][0]
    assert "rewrite-timestamp=true" in target["output"][0] and target["secret"] == ["id=ca,src=/s/ca"]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in found["target"])
    assert "cache-to" not in made(whole)["target"][bake.name(images[0])]


def test_layers_are_named_by_their_steps(material: report.Material) -> None:
    steps = ["ADD rootfs.tar / # buildkit", "RUN /bin/sh -c sh /opt/build/install/python.sh 3.13"]
    steps += ["RUN /bin/sh -c sh /opt/build/install/install.sh /opt/layer # buildkit"] * 4
    steps += ["RUN /bin/sh -c sh /opt/build/extensions/wheels.sh /opt/wheels", *steps[2:4]]
    steps += [
        "COPY facts/ /opt/blackwell/ # buildkit",
        "COPY /opt/blackwell/cache /opt/blackwell/cache # buildkit",
        "RUN /bin/sh -c true",
    ]
    layers = [Layer(digest=str(n), size=1, compressed={}, created_by=step) for n, step in enumerate(steps)]
    assert show.layer_names(layers, material.lock) == [
        "base", "virtual environment", "cuda", "cudnn", "triton", "torch", "extensions", "python", "fla", "facts and lock", "warm kernel cache", "RUN true",
    ]  # fmt: skip


def test_the_workflow_in_the_readme_asks_for_what_there_is() -> None:
    root = flow.Project.find().root
    block = (root / "README.md").read_text().split("<!-- workflow", 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    makefile = (root / "Makefile").read_text()
    targets = re.findall(r"run: make (\S+)", block)
    assert set(targets) == {".venv/.ready", "image", "verify", "publish"}
    for target in set(targets) - {".venv/.ready"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert '--to "$(TO)"' in makefile and '--id "$(ID)"' in makefile
    command = re.search(r"bin/builder (list .*?) \|", block)
    assert command
    listed = json.loads(CliRunner().invoke(cli, command[1].split()).output)
    locked = [image["id"] for image in listed if image["locked"]]
    assert len(locked) >= 2 and all(
        flow.choose(flow.Project.find(), plan.Request(id=found)).id == found for found in locked
    )
