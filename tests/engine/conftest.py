"""Builds on the real engine, made small: a real base and a lock of one pure-Python distribution, through the real template."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from builder import arch, build, flow, lock, plan
from builder.engine import debian, docker, host, uv
from builder.engine.process import run
from builder.values import Image, Lock


@dataclass(frozen=True, kw_only=True)
class Small:
    """What a small build needs: everything of a real one but the large distributions."""

    project: flow.Project
    engine: docker.Engine
    image: Image
    lock: Lock
    rootfs: Path
    uv: Path

    def work(self, changed: Lock | None = None) -> build.Work:
        return flow.work_of(self.project, self.image, changed or self.lock)

    def build(self, changed: Lock | None = None, say: Callable[[str], None] = print) -> build.Result:
        log = host.store() / "logs" / "small.log"
        flags = arch.gencode(self.image.capabilities)
        return build.build(
            run, self.engine, self.work(changed), rootfs=self.rootfs, uv=self.uv, gencode=flags, say=say, log=log
        )


def without_large(locked: Lock) -> Lock:
    """The lock with `packaging` (and its tools) alone: no torch, no extension."""
    kept = [d for d in locked.distributions if d.layer == "tools"]
    kept += [replace(d, layer="torch") for d in locked.distributions if d.name == "packaging"]
    return replace(locked, distributions=tuple(kept))


@pytest.fixture(scope="session")
def small() -> Small:
    project = flow.Project.find()
    image = flow.choose(project, plan.Request(triton="3.7", capabilities=("12.0",)))
    locked = flow.read_lock(project, image)
    engine = docker.ensure(run, print)
    flow.require_host_tools(run, print)
    store = host.store()
    rootfs = debian.locked_rootfs(run, image.base, image.arch, locked.epoch, locked.debian, store / "bases")
    tools = lock.requirements_text(locked.layer("tools"))
    tool = uv.tool(run, tools, python=image.base.python, platform=image.platform, store=store / "tools")
    named = replace(image, fla=replace(image.fla, version="0.0.small"))
    return Small(project=project, engine=engine, image=named, lock=without_large(locked), rootfs=rootfs, uv=tool)


@pytest.fixture(autouse=True)
def removes_its_images(small: Small) -> Iterator[None]:
    """No test leaves an image of its own."""
    yield
    for found in small.engine.api.images.list():
        for tag in found.tags:
            if "0.0.small" in tag or tag.startswith("builder-test:"):
                small.engine.api.images.remove(tag, force=True)
