"""The command line, as `python -m jaxspec`."""

import sys

from jaxspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
