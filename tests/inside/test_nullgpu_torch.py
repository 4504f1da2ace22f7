"""What runs under the null GPU, what is exact there, and what fails: each test is one section of nullgpu_sections.py."""

import ast

import pytest
from nullgpu_helper import HERE, needs_compiler, section_results

pytest.importorskip("torch")
SOURCE = ast.parse((HERE / "nullgpu_sections.py").read_text())
HELPERS = next(
    ast.literal_eval(n.value)
    for n in SOURCE.body
    if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "HELPERS"
)
NAMES = [node.name for node in SOURCE.body if isinstance(node, ast.FunctionDef) and node.name not in HELPERS]


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_section(name: str) -> None:
    passed, text = section_results()[name]
    assert passed, text
