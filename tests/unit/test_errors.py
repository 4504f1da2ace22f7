"""One class per way to fail, one exit code each."""

from builder import errors


def classes() -> list[type[errors.BuilderError]]:
    found: list[type[errors.BuilderError]] = []
    todo = list(errors.BuilderError.__subclasses__())
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found


def test_exit_codes_are_unique_and_not_those_of_python_and_click() -> None:
    codes = [c.exit_code for c in classes()]
    assert len(codes) == len(set(codes))
    assert not {0, 1, 2} & set(codes)


def test_every_error_is_documented() -> None:
    assert all(c.__doc__ for c in classes())
