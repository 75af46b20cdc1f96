"""Where things are in a checkout."""

import pathlib

TESTS = pathlib.Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
GOLDEN_DIR = TESTS / "golden"
