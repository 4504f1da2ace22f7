"""The verdict on an image: which tests ran against which digest, and how they ended."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from builder.errors import VerifyError


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """One test: name, outcome (passed, failed, skipped), seconds, and why it failed or was skipped."""

    name: str
    outcome: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the tests said of one digest. It counts for that digest and lock alone."""

    id: str
    digest: str
    lock: str
    tests: tuple[TestResult, ...]

    @property
    def passed(self) -> bool:
        """Did at least one test pass, and none fail?"""
        outcomes = {t.outcome for t in self.tests}
        return "passed" in outcomes and "failed" not in outcomes

    def counts(self) -> Mapping[str, int]:
        """Number of tests by outcome."""
        return {o: sum(t.outcome == o for t in self.tests) for o in ("passed", "failed", "skipped")}

    def dumps(self) -> str:
        """The verdict as JSON."""
        return json.dumps({**asdict(self), "passed": self.passed, "counts": dict(self.counts())}, indent=2) + "\n"

    @classmethod
    def loads(cls, data: bytes) -> "Verdict":
        """Read the bytes of what `dumps` wrote. Raises VerifyError for anything else."""
        try:
            return cls.from_dict(json.loads(data))
        except ValueError as error:
            raise VerifyError(
                f"a stored verdict is damaged: {error}", hint="verify the image again with `builder verify`"
            ) from error

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Verdict":
        """Read what `dumps` wrote. Raises VerifyError for anything else."""
        try:
            tests = tuple(TestResult(**t) for t in value["tests"])
            return cls(id=value["id"], digest=value["digest"], lock=value["lock"], tests=tests)
        except (KeyError, TypeError, AttributeError) as error:
            raise VerifyError(
                f"a stored verdict is damaged: {error!r}", hint="verify the image again with `builder verify`"
            ) from error


def read_junit(xml: str) -> tuple[TestResult, ...]:
    """Test results of a JUnit XML report, in its order."""
    results = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, reason = "failed", child.get("message", "")
            elif child.tag == "skipped" and outcome == "passed":
                outcome, reason = "skipped", child.get("message", "")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        results.append(TestResult(name=name, outcome=outcome, seconds=float(case.get("time", 0)), reason=reason[:300]))
    return tuple(results)
