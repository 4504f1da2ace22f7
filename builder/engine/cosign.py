"""Sign a pushed digest with cosign, where it is installed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from builder.engine import scratch
from builder.engine.process import Runner
from builder.engine.skopeo import Access
from builder.errors import CommandError, PublishError

NOT_INSTALLED = "not signed: cosign is not installed on this machine"
NO_IDENTITY = "not signed: cosign is here, but has neither --sign-key nor an identity token of a CI system"
ONLY_IN_REGISTRIES = "not signed: cosign signs images in registries only"
# Where CI systems leave an identity for keyless signing; without one cosign would open a browser.
IDENTITIES = ("SIGSTORE_ID_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_URL")


def sign(run: Runner, reference: str, access: Access, key: str, say: Callable[[str], None]) -> str:
    """Sign HOST/REPO@DIGEST with a key, or keyless where there is an identity; returns a sentence about what happened.

    Raises PublishError when a key is given and signing is not possible or fails.
    """
    if not shutil.which("cosign"):
        if key:
            raise PublishError(
                "a signing key is given, but cosign is not installed; no tag was moved",
                hint="install cosign (https://docs.sigstore.dev), or leave --sign-key out",
            )
        say(NOT_INSTALLED)
        return NOT_INSTALLED
    if not key and not any(os.environ.get(name) for name in IDENTITIES):
        say(NO_IDENTITY)
        return NO_IDENTITY
    argv: list[str | Path] = ["cosign", "sign", "--yes"]
    if key:  # a private team's image names don't belong into the public log, which only keyless signatures need
        argv += ["--key", key, "--tlog-upload=false"]
    if not access.verifies(reference):
        argv += ["--allow-insecure-registry", "--allow-http-registry"]
    for authority in sorted(access.certificates.glob("*.crt"))[:1] if access.certificates else []:
        argv += ["--registry-cacert", authority]
    with scratch.directory() as folder:
        if access.authfile:
            (folder / "config.json").write_bytes(access.authfile.read_bytes())
        try:
            run([*argv, reference], env={"DOCKER_CONFIG": str(folder)} if access.authfile else {})
        except CommandError as error:
            raise PublishError(
                f"cosign did not sign {reference}; no tag was moved:\n{error.message}",
                hint="mend what cosign says, then run the same command again: what was pushed stays",
            ) from error
    return f"signed with {key}" if key else "signed with this CI job's identity"
