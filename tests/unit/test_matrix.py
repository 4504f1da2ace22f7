"""Reading the matrix: what is sound becomes frozen values, what is not is an error that names every problem with its path."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from builder import rows
from builder.errors import MatrixError
from builder.matrix import from_dict, load
from builder.values import Capability, Matrix

MATRICES = Path(__file__).parents[2] / "matrices"
TOOLKIT = 'toolkit = ["nvidia-cuda-nvcc==13.0.88"]'
STACK = f'[[stacks]]\ncuda = "13.0"\ntorch = "2.12.1"\ntriton = "3.7.1"\ndriver_floor = "580.65.06"\n{TOOLKIT}\n'
REST = """
capabilities = ["12.0"]
platforms = ["linux/amd64"]
budget_zstd_bytes = 1
defaults = { base = "trixie", fla = "0.6.0", conv1d = "1.7.0", capabilities = ["12.0"] }
bases = [{ name = "trixie", suite = "trixie", python = "3.13" }]
fla = [{ version = "0.6.0", transformers = "5.24.0" }]
conv1d = [{ version = "1.7.0" }]
"""


def problems(data: dict[str, Any]) -> list[str]:
    """The problems that `from_dict` finds, none for a sound matrix."""
    try:
        from_dict(data)
    except MatrixError as error:
        return error.problems
    return []


# --- the real files ----------------------------------------------------------------------------------------------------


def test_the_rows_that_must_work_are_there(matrix: Matrix) -> None:
    rows = {(s.cuda, s.torch, s.triton, s.override, s.conv1d) for s in matrix.stacks}
    assert {
        ("13.0", "2.12.1", "3.7.1", False, ""),
        ("13.0", "2.11.0", "3.6.0", False, ""),
        ("12.8", "2.10.0", "3.6.0", False, "none"),
        ("12.8", "2.10.0", "3.6.0", False, ""),
        ("13.0", "2.11.0", "3.7.1", True, ""),
        ("13.0", "2.12.0", "3.7.0", False, ""),
    } <= rows
    assert {fla.version for fla in matrix.fla} == {"0.6.0", "0.5.2"}
    assert set(matrix.conv1d) == {"1.7.0", "1.6.2.post1"}


def test_the_compiler_is_of_torchs_cuda_and_only_where_wheels_have_one(matrix: Matrix) -> None:
    for stack in matrix.stacks:
        nvcc = [pin.partition("==")[2] for pin in stack.toolkit if pin.startswith("nvidia-cuda-nvcc==")]
        assert all(version.startswith(f"{stack.cuda}.") for version in nvcc)
        assert bool(nvcc) == stack.cuda.startswith("13.")
        assert bool(stack.devel_image) == (stack.cuda == "12.8" and stack.conv1d != "none")


def test_a_matrix_is_frozen(matrix: Matrix) -> None:
    with pytest.raises(FrozenInstanceError):
        matrix.budget = 0  # type: ignore[misc]
    assert hash(matrix) == hash(load(MATRICES))


def test_numbers_of_the_matrix(matrix: Matrix) -> None:
    assert matrix.budget == 2_650_000_000
    assert (
        matrix.default_capabilities
        == matrix.capabilities
        == tuple(map(Capability.parse, ["10.0", "10.3", "12.0", "12.1"]))
    )
    assert {stack.cuda: stack.driver_floor for stack in matrix.stacks} == {"13.0": "580.65.06", "12.8": "570.26"}


# --- files -------------------------------------------------------------------------------------------------------------


def test_all_files_of_the_directory_are_one_matrix(directory: Callable[..., Path]) -> None:
    second = STACK.replace("2.12.1", "2.12.0").replace("3.7.1", "3.7.0")
    matrix = load(directory(a=STACK, b=second, c=REST))
    assert [stack.torch for stack in matrix.stacks] == ["2.12.1", "2.12.0"]


def test_locks_below_are_not_read(directory: Callable[..., Path]) -> None:
    path = directory(a=STACK, c=REST)
    (path / "locks").mkdir()
    (path / "locks" / "x.lock.toml").write_text("this is no TOML", encoding="utf-8")
    assert load(path).stacks


def test_a_new_triton_is_one_row_in_one_file(directory: Callable[..., Path]) -> None:
    row = STACK.replace("2.12.1", "99.1.0").replace("3.7.1", "98.0.0") + 'default_for = ["triton"]\n'
    files = {path.stem: path.read_text(encoding="utf-8") for path in MATRICES.glob("*.toml")}
    files["stacks"] += row
    assert ("99.1.0", "98.0.0") in {(stack.torch, stack.triton) for stack in load(directory(**files)).stacks}


def test_errors_of_all_files_come_at_once_and_name_their_file(directory: Callable[..., Path]) -> None:
    broken = STACK.replace('torch = "2.12.1"', 'torhc = "2.12.1"')
    with pytest.raises(MatrixError) as caught:
        load(directory(a=STACK, b=broken, c=REST.replace('"linux/amd64"', '"linux/amd46"'), d="[[stacks]\n"))
    found = caught.value.problems
    assert any(p.startswith("d.toml: ") and "line 1" in p for p in found)
    assert "b.toml: stacks[0].torhc: unknown key (did you mean 'torch'?)" in found
    assert "b.toml: stacks[0].torch: is missing" in found
    assert any(
        p.startswith("platforms[0]: 'linux/amd46' is not one of") and "did you mean 'linux/amd64'" in p for p in found
    )
    assert len(found) == 4
    assert all(problem in str(caught.value) for problem in found)


def test_a_file_that_cannot_be_read_makes_nothing_look_missing(directory: Callable[..., Path]) -> None:
    with pytest.raises(MatrixError) as caught:
        load(directory(a=STACK, c=REST.replace("[", "[[", 1)))
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith("c.toml: ")


def test_a_setting_in_two_files_is_an_error(directory: Callable[..., Path]) -> None:
    with pytest.raises(MatrixError, match=r"z\.toml: budget_zstd_bytes: stands in another file too"):
        load(directory(a=STACK, c=REST, z="budget_zstd_bytes = 2"))


def test_a_directory_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="no TOML file is here"):
        load(tmp_path)
    with pytest.raises(MatrixError, match="no TOML file is here"):
        load(tmp_path / "nowhere")


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MatrixError, match=r"a\.toml: .*utf-8"):
        load(tmp_path)


# --- single values -----------------------------------------------------------------------------------------------------


def spoil(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A function that puts a value at a path such as "stacks.0.torch" into a matrix."""

    def apply(data: dict[str, Any]) -> None:
        *way, last = (int(step) if step.isdigit() else step for step in path.split("."))
        place: Any = data
        for step in way:
            place = place[step]
        place[last] = value

    return apply


MALFORMED = [
    ("stakcs", [], "stakcs: unknown key (did you mean 'stacks'?)"),
    ("stacks.0.toolkits", [], "stacks[0].toolkits: unknown key (did you mean 'toolkit'?)"),
    ("stacks.0.torch", 2.12, "stacks[0].torch: must be a version in quotes, not 2.12"),
    ("stacks.0.torch", "two", "stacks[0].torch: 'two' is no version"),
    ("stacks.0.cuda", "13", "stacks[0].cuda: '13' is not a CUDA release as major.minor"),
    ("stacks.0.driver_floor", "r570", "stacks[0].driver_floor: 'r570' is not an NVIDIA driver version"),
    (
        "stacks.0.toolkit",
        ["nvidia-cuda-nvcc"],
        "stacks[0].toolkit[0]: 'nvidia-cuda-nvcc' is not a pinned distribution, name==version",
    ),
    ("stacks.0.devel_image", "nvidia/cuda:12.8", "stacks[0].devel_image: 'nvidia/cuda:12.8' is not an image by digest"),
    (
        "stacks.0.default_for",
        ["tritn"],
        "stacks[0].default_for[0]: 'tritn' is not one of cuda, torch, triton (did you mean 'triton'?)",
    ),
    ("stacks.0.default_for", ["triton", "triton"], "stacks[0].default_for[1]: 'triton' is there twice"),
    ("stacks.0.conv1d", "1.7.0", "stacks[0].conv1d: '1.7.0' is not one of none"),
    ("stacks.0", "row", "stacks[0]: must be a table, not 'row'"),
    ("stacks", {}, "stacks: must be an array of tables, [[stacks]]"),
    ("stacks", [], "stacks: needs at least one row"),
    ("bases.0.python", "3", "bases[0].python: '3' is not a Python such as 3.13"),
    ("bases.0.name", "Trixie!", "bases[0].name: 'Trixie!' is not a name of at most 40 small letters"),
    ("capabilities", ["12"], "capabilities[0]: '12' is no compute capability such as '12.0'"),
    ("capabilities", [12.0], "capabilities[0]: must be a compute capability in quotes, not 12.0"),
    ("capabilities", [], "capabilities: must be a list with something in it, not []"),
    ("budget_zstd_bytes", "2.3 GB", "budget_zstd_bytes: must be a positive number of bytes, not '2.3 GB'"),
    ("budget_zstd_bytes", True, "budget_zstd_bytes: must be a positive number of bytes, not True"),
    ("defaults.flaa", "0.6.0", "defaults.flaa: unknown key (did you mean 'fla'?)"),
    (
        "rules.0.verdict",
        "refused",
        "rules[0].verdict: 'refused' is not one of refuse, warn, note (did you mean 'refuse'?)",
    ),
    ("rules.0.when", {}, "rules[0].when: must name at least one axis"),
    ("rules.0.when", {"tritn": "==3.7.0"}, "rules[0].when.tritn: unknown key (did you mean 'triton'?)"),
    ("rules.0.when.triton", "3.7.0", "rules[0].when.triton: '3.7.0' is no version specifier such as '>=3.6,<3.8'"),
    ("rules.0.when.triton", "", "rules[0].when.triton: must be a version specifier such as"),
    ("rules.0.when.capabilities", ["sm_120"], "rules[0].when.capabilities[0]: 'sm_120' is no compute capability"),
    ("rules.0.url", "see the forum", "rules[0].url: 'see the forum' is not an https address"),
    ("rules.0.sentence", " ", "rules[0].sentence: must be a non-empty string, not ' '"),
    ("excludes", [{"when": {"capabilities": ["12.0"]}, "reason": "x"}], "excludes[0].when.capabilities: unknown key"),
]


@pytest.mark.parametrize(("path", "value", "expected"), MALFORMED)
def test_a_malformed_value_is_named_with_its_path(small: dict[str, Any], path: str, value: Any, expected: str) -> None:
    spoil(path, value)(small)
    assert [p for p in problems(small) if p.startswith(expected)], problems(small)


@pytest.mark.parametrize(
    "key", ["capabilities", "platforms", "budget_zstd_bytes", "defaults", "bases", "stacks", "fla", "conv1d"]
)
def test_what_is_missing_is_named(small: dict[str, Any], key: str) -> None:
    del small[key]
    assert any(p.startswith(f"{key}: ") for p in problems(small))


@pytest.mark.parametrize(
    "path", ["defaults.base", "stacks.0.torch", "stacks.1.driver_floor", "fla.0.transformers", "rules.0.instead"]
)
def test_a_missing_key_is_named_with_its_path(small: dict[str, Any], path: str) -> None:
    *way, last = path.split(".")
    place: Any = small
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    del place[last]
    name = path.replace(".0.", "[0].").replace(".1.", "[1].")
    assert problems(small) == [f"{name}: is missing"]


def test_all_problems_come_at_once(small: dict[str, Any]) -> None:
    spoil("stacks.0.torch", "two")(small)
    spoil("bases.0.reference", "x@sha256:" + "0" * 64)(small)
    spoil("rules.0.verdict", "no")(small)
    small["rulez"] = []
    assert len(problems(small)) == 4


# --- rows that contradict each other -----------------------------------------------------------------------------------

DIGEST = "registry.example.com/cuda@sha256:" + "0" * 64


def test_the_small_matrix_is_sound(small: dict[str, Any]) -> None:
    assert problems(small) == []


@pytest.mark.parametrize("key", ["bases", "stacks", "fla", "conv1d", "rules"])
def test_a_duplicate_row(small: dict[str, Any], key: str) -> None:
    small[key].append(dict(small[key][0]))
    last = len(small[key]) - 1
    assert f"{key}[{last}]: is a duplicate of {key}[0]" in problems(small)


def test_the_same_stack_with_and_without_the_extension_is_no_duplicate(small: dict[str, Any]) -> None:
    small["stacks"].append({**small["stacks"][1], "conv1d": "none"})
    assert problems(small) == []


CONTRADICTIONS = [
    ("defaults.fla", "0.6.1", "defaults.fla: '0.6.1' names no row (did you mean '0.6.0'?)"),
    ("defaults.base", "trixi", "defaults.base: 'trixi' names no row (did you mean 'trixie'?)"),
    ("defaults.capabilities", ["12.1"], "defaults.capabilities: '12.1' names no row"),
    ("excludes", [{"when": {"torch": ">=3"}, "reason": "x"}], "excludes[0].when: excludes nothing"),
    ("excludes", [{"when": {"conv1d": "none"}, "reason": "x"}], "excludes[0].when: excludes nothing"),
    ("excludes", [{"when": {"platform": "linux/arm64"}, "reason": "x"}], "excludes[0].when: excludes nothing"),
    ("excludes", [{"when": {"override": True}, "reason": "x"}], "excludes[0].when: excludes nothing"),
    (
        "excludes",
        [{"when": {"torch": "==2.12.1", "triton": "==3.7.0"}, "reason": "x"}],
        "excludes[0].when: excludes nothing",
    ),
    (
        "stacks.0.triton_pin",
        "3.6.0",
        "stacks[0].reason: is missing: torch pins Triton 3.6.0, so say why it is 3.7.1 here",
    ),
    ("stacks.0.triton_pin", "3.7.1", "stacks[0].triton_pin: only for a Triton that torch doesn't pin"),
    ("stacks.0.reason", "because", "stacks[0].triton_pin: only for a Triton that torch doesn't pin"),
    ("stacks.0.cuda", "12.8", "stacks[0].toolkit: nvcc 13.0.88 is not of torch's CUDA 12.8"),
    ("stacks.0.toolkit", ["nvidia-cuda-crt==13.0.88"], "stacks[0]: has no compiler for causal-conv1d"),
    (
        "stacks.0.devel_image",
        DIGEST,
        "stacks[0]: takes its compiler from `toolkit` or from `devel_image`, not from both",
    ),
    ("stacks.1.default_for", ["triton"], "stacks[1].default_for: stacks[0] is the default for triton 3.7 already"),
    ("bases.0.reference", DIGEST, "bases[0]: needs exactly one of `suite` and `reference`"),
]


@pytest.mark.parametrize(("path", "value", "expected"), CONTRADICTIONS)
def test_a_contradiction_is_named_with_its_path(small: dict[str, Any], path: str, value: Any, expected: str) -> None:
    spoil(path, value)(small)
    assert [p for p in problems(small) if p.startswith(expected)], problems(small)


def test_an_exclude_that_meets_something_is_sound(small: dict[str, Any]) -> None:
    small["excludes"] = [
        {"when": {"torch": "==2.12.0", "fla": ">=0.6", "base": "trixie", "conv1d": ">=0"}, "reason": "x"}
    ]
    assert problems(small) == []


def test_an_override_with_a_reason_is_sound(small: dict[str, Any]) -> None:
    small["stacks"][0] |= {"triton_pin": "3.6.0", "reason": "somebody needs it"}
    stack = from_dict(small).stacks[0]
    assert (stack.override, stack.triton, stack.triton_pin) == (True, "3.7.1", "3.6.0")


# --- the JSON Schema ---------------------------------------------------------------------------------------------------

SCHEMA = json.loads((MATRICES / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", sorted(MATRICES.glob("*.toml")), ids=lambda file: file.name)
def test_the_real_files_fit_the_schema_and_name_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("#:schema ./schema.json\n")
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))] == []


def test_the_small_matrix_fits_the_schema(small: dict[str, Any]) -> None:
    VALIDATOR.validate(small)


# An empty array of rows can stand in one file and rows in another, so that only the loader can object.
@pytest.mark.parametrize(("path", "value", "expected"), [case for case in MALFORMED if case[:2] != ("stacks", [])])
def test_the_schema_rejects_what_the_loader_rejects(
    small: dict[str, Any], path: str, value: Any, expected: str
) -> None:
    spoil(path, value)(small)
    assert not VALIDATOR.is_valid(small)


def test_the_schema_has_the_keys_of_the_loader() -> None:
    properties = SCHEMA["properties"]
    assert set(properties) == {*rows.ROWS, *rows.SETTINGS}
    for key, (required, optional) in rows.ROWS.items():
        item = properties[key]["items"]
        assert set(item["properties"]) == {*required, *optional}, key
        assert set(item["required"]) == set(required), key
    assert set(properties["defaults"]["properties"]) == set(rows.DEFAULTS)
    assert set(properties["excludes"]["items"]["properties"]["when"]["properties"]) == set(rows.CONDITIONS)
    assert set(properties["rules"]["items"]["properties"]["when"]["properties"]) == {*rows.CONDITIONS, "capabilities"}


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "a directory": lambda p: p.mkdir(),
    "a dangling link": lambda p: p.symlink_to("/nonexistent"),
    "no UTF-8": lambda p: p.write_bytes(b"\xff\xfe"),
    "a number of thousands of digits": lambda p: p.write_text("x = " + "9" * 5000),
    "too deep": lambda p: p.write_text("x = " + "[" * 5000),
    "a byte order mark": lambda p: p.write_bytes(b"\xef\xbb\xbfx = 1"),
    "a hexadecimal number too large to show": lambda p: p.write_text("capabilities = [0x" + "f" * 5000 + "]"),
    "a version of thousands of digits": lambda p: p.write_text(f'[[conv1d]]\nversion = "{"9" * 5000}"\n'),
    "a specifier of thousands of digits": lambda p: p.write_text(
        '[[excludes]]\nreason = "r"\nwhen = {fla = ">=' + "9" * 5000 + '"}\n'
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_whatever_a_file_is_the_error_names_it(kind: str, tmp_path: Path) -> None:
    UNREADABLE[kind](tmp_path / "odd.toml")
    with pytest.raises(MatrixError) as refused:
        load(tmp_path)
    assert any(p.startswith(("odd.toml: ", "capabilities[0]: ")) for p in refused.value.problems), (
        refused.value.problems
    )
    assert max(map(len, refused.value.problems)) < 400


@pytest.mark.parametrize("version", ["0.7+cu130", "1!2.0", " 0.7", "0.7 ", "v0.7", "0.7-1", "0.7.0RC1"])
def test_a_version_that_no_tag_can_hold_or_no_index_spells_is_refused(small: dict[str, Any], version: str) -> None:
    small["fla"].append({"version": version, "transformers": "5.24.0"})
    assert [p for p in problems(small) if p.startswith("fla[1].version: ")]


@pytest.mark.parametrize("name", ["trixie-arm64", "trixie-amd64", "x-sm120", "a" * 41])
def test_a_base_whose_name_makes_two_images_one_is_refused(small: dict[str, Any], name: str) -> None:
    small["bases"].append({"name": name, "suite": "trixie", "python": "3.13"})
    assert [p for p in problems(small) if p.startswith("bases[1].name: ")]


def test_an_identifier_must_fit_into_a_tag(small: dict[str, Any]) -> None:
    small["bases"].append({"name": "b" * 40, "suite": "trixie", "python": "3.13"})
    small["fla"][0]["version"] = small["defaults"]["fla"] = "0.6.0.dev20261201"
    small["conv1d"][0]["version"] = small["defaults"]["conv1d"] = "1.7.0.dev20261201"
    assert [p for p in problems(small) if p.startswith("bases[1].name: makes an identifier of ")]


@pytest.mark.parametrize("reference", ['a"b', "-o/x", "a b", "a\\b"])
def test_a_reference_that_would_break_a_lock_or_a_dockerfile_is_refused(small: dict[str, Any], reference: str) -> None:
    small["bases"].append({"name": "own", "reference": f"{reference}@sha256:{'a' * 64}", "python": "3.13"})
    assert [p for p in problems(small) if p.startswith("bases[1].reference: ")]


@pytest.mark.parametrize("value", [["trixie"], {"a": 1}, "", "."])
def test_a_value_that_looks_like_a_path_is_kept_apart_from_it(small: dict[str, Any], value: Any) -> None:
    small["bases"][0]["name"] = value
    assert [p for p in problems(small) if p.startswith("bases[0].name: ")]
