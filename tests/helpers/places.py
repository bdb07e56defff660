"""Where things are in a checkout."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "programs"
ROOT = TESTS.parent
