"""A registry's manifests and tags over HTTP: the few requests that skopeo 1.9 (Debian 12) can't make.

It drops `artifactType` from the indexes it copies, so an index of referrers, and tags, are put here; blobs travel by skopeo.
To be replaced by `skopeo copy` once the oldest supported Debian has skopeo 1.14, which knows OCI 1.1
(https://github.com/containers/skopeo/releases).
"""

import base64
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any

from builder.engine.places import home, variable
from builder.engine.process import Runner
from builder.engine.skopeo import Access
from builder.errors import CommandError, PublishError

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
TIMEOUT = 60


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Status, headers and body of an answer."""

    status: int
    headers: Message
    body: bytes


@dataclass(kw_only=True)
class Repository:
    """One repository of a registry, HOST/REPO; remembers its authorization while it lives."""

    name: str
    access: Access
    run: Runner
    _authorization: str = field(default="", repr=False)
    _base: str = ""

    @property
    def host(self) -> str:
        """Host and port."""
        return self.name.partition("/")[0]

    @property
    def path(self) -> str:
        """The repository's name within the registry."""
        return self.name.partition("/")[2]

    def manifest(self, reference: str) -> bytes | None:
        """Bytes of the manifest that a tag or digest names, or None if there is none."""
        reply = self._ask("GET", f"/manifests/{reference}", headers={"Accept": ", ".join(MANIFESTS)})
        if reply.status == 404:
            return None
        body = self._good(reply, f"read {reference}").body
        parsed(body, f"{self.name}: what the registry has as {reference}")
        return body

    def put(self, reference: str, manifest: bytes, media_type: str) -> None:
        """Put a manifest under a tag or its digest; the registry refuses one whose parts it lacks."""
        reply = self._ask("PUT", f"/manifests/{reference}", manifest, {"Content-Type": media_type})
        self._good(reply, f"write {reference}")

    def tags(self) -> list[str]:
        """The repository's tags in name order."""
        reply = self._ask("GET", "/tags/list")
        if reply.status == 404:
            return []
        listed = parsed(self._good(reply, "list tags").body, f"{self.name}: the registry's list of tags")
        return sorted(listed.get("tags") or [])

    def referrers(self, digest: str) -> bytes | None:
        """The index that the referrers API of OCI distribution 1.1 answers with, or None where the registry has no such API."""
        reply = self._ask("GET", f"/referrers/{digest}", headers={"Accept": MANIFESTS[1]})
        has_api = reply.status == 200 and "image.index" in reply.headers.get("Content-Type", "")
        if has_api:
            parsed(reply.body, f"{self.name}: what the registry answered about referrers")
        return reply.body if has_api else None

    def _good(self, reply: Reply, what: str) -> Reply:
        if reply.status in (401, 403):
            raise PublishError(
                f"{self.name}: the registry refuses these credentials (status {reply.status}, to {what})",
                hint="log in with `docker login` or `skopeo login`, or name a file with --authfile",
            )
        if reply.status >= 300:
            text = reply.body.decode(errors="replace")[:300]
            raise PublishError(
                f"{self.name}: the registry answered {reply.status} to {what}: {text}",
                hint="mend that at the registry, then run the same command again: what is there already is not sent twice",
            )
        return reply

    def _ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
        url = f"/v2/{self.path}{path}"
        reply = self._send(method, url, body, headers or {})
        challenge = reply.headers.get("WWW-Authenticate", "")
        if reply.status == 401 and challenge:
            self._authorization = self._answer(challenge)
            reply = self._send(method, url, body, headers or {})
        return reply

    def _send(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        if self._authorization:
            headers = {**headers, "Authorization": self._authorization}
        if self._base:
            return self._open(urllib.request.Request(self._base + url, body, headers, method=method))
        schemes = ("https",) if self.access.verifies(self.name) else ("https", "http")
        for scheme in schemes:  # the first answer decides which one is spoken
            try:
                reply = self._open(urllib.request.Request(f"{scheme}://{self.host}{url}", body, headers, method=method))
            except PublishError:
                if scheme == schemes[-1]:
                    raise
                continue
            self._base = f"{scheme}://{self.host}"
            return reply
        raise AssertionError("not reached")

    def _open(self, request: urllib.request.Request) -> Reply:
        handler = urllib.request.HTTPSHandler(context=self._tls())
        try:
            with urllib.request.build_opener(handler).open(request, timeout=TIMEOUT) as answer:
                return Reply(status=answer.status, headers=answer.headers, body=answer.read())
        except urllib.error.HTTPError as error:
            return Reply(status=error.code, headers=error.headers, body=error.read())
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise PublishError(
                f"{self.name}: the registry can't be reached: {reason}",
                hint="check the address, --cert-dir and --insecure, and the network; then run the same command again",
            ) from error

    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if folder := self.access.certificates:
            for authority in sorted(folder.glob("*.crt")):
                context.load_verify_locations(authority)
            for client in sorted(folder.glob("*.cert")):
                context.load_cert_chain(client, client.with_suffix(".key"))
        if not self.access.verifies(self.name):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _answer(self, challenge: str) -> str:
        """The Authorization header that a challenge asks for: Basic, or a Bearer token fetched from its realm."""
        basic = self._basic()
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return basic
        parts = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        query = {"service": parts.get("service", ""), "scope": f"repository:{self.path}:pull,push"}
        url = parts.get("realm", "") + "?" + urllib.parse.urlencode({k: v for k, v in query.items() if v})
        if urllib.parse.urlsplit(url).scheme != "https" and self.access.verifies(self.name):
            raise PublishError(
                f"{self.name}: the registry wants the password sent to {url.partition('?')[0]}, without TLS",
                hint="mend the registry's address, or allow that with --insecure",
            )
        headers = {"Authorization": basic} if basic else {}
        reply = self._good(self._open(urllib.request.Request(url, headers=headers)), "log in")
        token = parsed(reply.body, f"{self.name}: what the registry answered to log in")
        return f"Bearer {token.get('token') or token.get('access_token', '')}"

    def _basic(self) -> str:
        for path in _authfiles(self.access):
            data = parsed(path.read_bytes(), str(path), hint="mend it, or log in anew with `docker login`")
            if not all(isinstance(data.get(k) or {}, dict) for k in ("auths", "credHelpers")):
                raise PublishError(
                    f"{path} holds no credentials in Docker's format", hint="log in anew with `docker login`"
                )
            helper = (data.get("credHelpers") or {}).get(self.host) or data.get("credsStore")
            entries = data.get("auths") or {}
            keys = [self.name.rsplit("/", n)[0] for n in range(self.name.count("/") + 1)]
            found = next((entries[k] for k in [*keys, f"https://{self.host}"] if entries.get(k, {}).get("auth")), None)
            if found:
                return f"Basic {found['auth']}"
            if helper:
                try:
                    answer = json.loads(self.run([f"docker-credential-{helper}", "get"], text=self.host))
                except (CommandError, ValueError):
                    continue
                return "Basic " + base64.b64encode(f"{answer['Username']}:{answer['Secret']}".encode()).decode()
        return ""


def parsed(data: bytes, what: str, *, hint: str = "") -> dict[str, Any]:
    """An object in JSON. Raises PublishError, naming what it should be, for anything else: a proxy's page, half an answer."""
    try:
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise PublishError(f"{what} is no JSON object", hint=hint or "check the address and what stands between; then run the same command again")  # fmt: skip


def _authfiles(access: Access) -> list[Path]:
    """Files with credentials, in the order in which skopeo looks at them."""
    if access.authfile:
        return [access.authfile]
    named = [variable("REGISTRY_AUTH_FILE")]
    named += [f"{variable('XDG_RUNTIME_DIR') or f'/run/containers/{os.getuid()}'}/containers/auth.json"]
    named += [str(Path(variable("DOCKER_CONFIG") or home() / ".docker") / "config.json")]
    return [Path(p) for p in named if p and Path(p).is_file()]
