"""What the host says of indexes, proxies and certificates, in uv's words."""

from pathlib import Path
from typing import Any

import pytest

from builder.engine import environment
from builder.engine.process import redact
from builder.errors import CommandError, EngineError


class Said:
    """A runner that answers every command with one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, argv: Any, **_: Any) -> str:
        return self.text


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment.UV_VARIABLES, *environment.PROXIES, "DEBIAN_MIRROR"):
        monkeypatch.delenv(name, raising=False)


PIP = "global.index-url='https://a.example/simple'\nglobal.extra-index-url='file:///disk https://b.example/simple'\n"


def test_pip_s_indexes_are_translated_and_those_on_disk_left_out() -> None:
    found = environment.index_environment(Said(PIP))
    assert found == {"UV_DEFAULT_INDEX": "https://a.example/simple", "UV_INDEX": "https://b.example/simple"}


def test_pip_s_environment_wins_over_its_files() -> None:
    found = environment.index_environment(Said(PIP + ":env:.index-url='https://c.example/simple'\n"))
    assert found["UV_DEFAULT_INDEX"] == "https://c.example/simple"


def test_uv_s_own_settings_win_over_pip_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://uv.example/simple")
    assert environment.index_environment(Said(PIP))["UV_DEFAULT_INDEX"] == "https://uv.example/simple"


def test_the_secret_script_exports_proxies_and_quotes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://u:p'w@proxy:1")
    assert environment.secret_script(Said("")) == "export https_proxy='http://u:p'\"'\"'w@proxy:1'\n"


def test_the_mirror_is_the_environment_s_or_that_of_the_host_s_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.debian_mirror(Said("http://m.example/debian/\nhttp://n.example/\n")) == "http://m.example/debian"
    monkeypatch.setenv("DEBIAN_MIRROR", "http://own.example")
    assert environment.debian_mirror(Said("")) == "http://own.example"


def test_no_mirror_is_said() -> None:
    def fails(argv: Any, **_: Any) -> str:
        raise CommandError(("apt-get",), 127, "")

    with pytest.raises(EngineError, match="no Debian mirror") as refused:
        environment.debian_mirror(fails)
    assert "DEBIAN_MIRROR" in refused.value.hint


def test_the_certificate_bundle_is_the_environment_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    assert environment.ca_bundle() == bundle


@pytest.mark.parametrize("text", ["see https://user:secret@host/simple", "http://:token@h/x and ftp://a:b@c"])
def test_passwords_in_urls_are_taken_out(text: str) -> None:
    assert "secret" not in redact(text) and "token" not in redact(text) and "a:b@" not in redact(text)
    assert "***@" in redact(text)
