"""Start-up hook of Python processes that `blackwell warm` watches: starts the recorder, then runs whichever sitecustomize comes next."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

try:
    from blackwell import after_import
except ModuleNotFoundError:  # not the image's interpreter: the package lies three directories up
    sys.path.append(str(HERE.parents[2]))
    from blackwell import after_import

if os.environ.get("BLACKWELL_WARM_EVENTS"):
    from blackwell.warm import recorder

    recorder.start()
after_import.run_next_sitecustomize(HERE)
