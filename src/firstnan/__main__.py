"""`python -m firstnan` runs the command `firstnan`."""

import sys

from firstnan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
