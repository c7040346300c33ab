"""Where the tests find the repository and, where present, real files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

REAL = ROOT.parent / "shared" / "data" / "real"
"""Real surfaces, which are no part of the repository; tests that want them skip without."""

FIXTURES = ROOT / "tests" / "fixtures"
"""Files of earlier versions."""
