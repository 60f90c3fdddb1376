"""``python -m autopar`` is the command ``autopar``."""

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
