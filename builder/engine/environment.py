"""What the host says about indexes, mirrors, proxies and certificates; read from pip's, uv's and apt's own settings.

Nothing of it may reach a layer, the history, a label or a lock: builds get it as secrets.
"""

import os
import shlex
import sys
from pathlib import Path

from builder.engine.places import home, of_user, variable
from builder.engine.process import Runner
from builder.errors import CommandError, EngineError

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
UV_VARIABLES = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_EXTRA_INDEX_URL",
    "UV_INDEX_STRATEGY",
    "UV_INSECURE_HOST",
    "UV_KEYRING_PROVIDER",
    "UV_NATIVE_TLS",
    "UV_HTTP_TIMEOUT",
)
CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


def index_environment(run: Runner) -> dict[str, str]:
    """uv's index variables: uv's own where set, else pip's configuration (files and environment) in uv's words.

    Indexes on this machine's disk (file:) are left out: a build can't see them.
    """
    env = {k: os.environ[k] for k in UV_VARIABLES if os.environ.get(k)}
    pip = _pip_configuration(run)
    if not any(k in env for k in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")) and pip.get("index-url", "").startswith("http"):
        env["UV_DEFAULT_INDEX"] = pip["index-url"]
    extra = [u for u in pip.get("extra-index-url", "").split() if u.startswith("http")]
    if not any(k in env for k in ("UV_INDEX", "UV_EXTRA_INDEX_URL")) and extra:
        env["UV_INDEX"] = " ".join(extra)
    if pip.get("trusted-host") and "UV_INSECURE_HOST" not in env:
        env["UV_INSECURE_HOST"] = " ".join(pip["trusted-host"].split())
    return env


def _pip_configuration(run: Runner) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in run([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if name.startswith(":env:") or key not in found:  # pip lets the environment win
            found[key] = value.strip().strip("'\"").replace("\\n", " ")
    return found


def ca_bundle() -> Path | None:
    """The host's certificate bundle, or None."""
    named = [os.environ.get(k, "") for k in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")]
    return next((Path(p) for p in (*named, *CA_BUNDLES) if p and Path(p).is_file()), None)


def secret_script(run: Runner) -> str:
    """A shell fragment that a build step sources: proxies and indexes of the host, as exports."""
    exports = {**index_environment(run), **{k: os.environ[k] for k in PROXIES if os.environ.get(k)}}
    return "".join(f"export {k}={shlex.quote(v)}\n" for k, v in sorted(exports.items()))


def uv_configuration() -> Path | None:
    """The user's or the system's uv.toml, or None."""
    settings = of_user("XDG_CONFIG_HOME", ".config")
    return next((p for p in (settings / "uv" / "uv.toml", Path("/etc/uv/uv.toml")) if p.is_file()), None)


def netrc() -> Path | None:
    """The user's netrc, which may hold the credentials of a private index, or None."""
    path = Path(variable("NETRC") or home() / ".netrc")
    return path if path.is_file() else None


def debian_mirror(run: Runner) -> str:
    """The Debian mirror: DEBIAN_MIRROR, else the one in the host's own apt sources. Raises EngineError if there is none."""
    if named := os.environ.get("DEBIAN_MIRROR"):
        return named
    try:
        sites = run(
            [
                "apt-get",
                "indextargets",
                "--format",
                "$(REPO_URI)",
                "Created-By: Packages",
                "Origin: Debian",
                "Label: Debian",
            ]
        )
    except CommandError as error:
        if error.code != 127:
            raise EngineError(
                f"the Debian mirror is not known: apt-get could not say it:\n{error.message}",
                hint="mend what it says, or set DEBIAN_MIRROR to the URL of a Debian mirror",
            ) from error
        sites = ""  # no apt on this host
    for site in sites.splitlines():
        return site.rstrip("/")
    raise EngineError(
        "no Debian mirror is known: this host's apt sources name none, or `apt-get update` never ran",
        hint="run `apt-get update`, or set DEBIAN_MIRROR to the URL of a Debian mirror",
    )
