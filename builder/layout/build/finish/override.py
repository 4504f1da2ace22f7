"""Where Triton overrides torch's own pin: let torch's metadata ask for the Triton that is here, as image.json says.

Otherwise pip can't install anything that depends on torch: the constraints keep this Triton, torch asks for another. Ends with an error
when the line to change is not there. Prints nothing and changes nothing in an image without an override.
"""

import json
import re
import sys
from importlib.metadata import distribution
from pathlib import Path

facts = json.loads(Path("/opt/blackwell/image.json").read_text())
if facts["override"]:
    (metadata,) = Path(str(distribution("torch").locate_file(""))).glob("torch-*.dist-info/METADATA")
    wanted = facts["versions"]["triton"]
    text, changed = re.subn(r"(?m)^(Requires-Dist: triton) ?\(?==[^;)\n]+\)?", rf"\1=={wanted}", metadata.read_text())
    if not changed:
        sys.exit(f"override.py: torch's metadata names no Triton to be replaced by {wanted}")
    metadata.write_text(text)
