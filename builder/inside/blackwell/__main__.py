"""`python -m blackwell`."""

import sys

from blackwell.cli import main

if __name__ == "__main__":
    sys.exit(main())
