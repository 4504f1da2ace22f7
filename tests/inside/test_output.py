"""Tables for people: no Python in a cell."""

from blackwell.output import flat


def test_nested_answers_become_rows() -> None:
    content = {"a": 1, "b": {"c": {"d": 2}, "e": []}, "f": None, "g": ["x", "y"], "h": {}}
    assert list(flat(content)) == [("a", 1), ("b.c.d", 2), ("b.e", "-"), ("f", "-"), ("g", "x, y"), ("h", "-")]
