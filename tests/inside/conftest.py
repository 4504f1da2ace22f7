"""Tests of the code that lives inside the image; they import `blackwell` from the source tree or, in CI, run inside the image."""

import sys
from pathlib import Path

INSIDE = Path(__file__).resolve().parents[2] / "builder" / "inside"
if INSIDE.is_dir() and str(INSIDE) not in sys.path:
    sys.path.insert(0, str(INSIDE))
