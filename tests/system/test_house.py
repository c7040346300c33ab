"""The rules of the house that a machine can check: lengths, and who may know a mixer by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.paths import ROOT

ROOMS = ("cpflare", "data_prep", "launch", "benchmarks", "tests")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

MOST_LINES, MOST_LINES_OF_TESTS, MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_LAUNCH = 350, 450, 60, 900

MIXER = re.compile(
    r"flare_?pp|flare\+\+|transolver|\bcano\b|galerkin|\bisab\b|\bab-?upt\b|perceiver|\blno\b|\bgnot\b",
    re.IGNORECASE,
)
"""Names of mixers. FLARE alone is the name of a family, of its code, and of this package."""

MAY_NAME_MIXERS = ("cpflare/models/", "cpflare/cli/")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_are_files_to_check():
    assert len(FILES) > 200


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_is_longer_than_one_can_see_through(room):
    limit = MOST_LINES_OF_TESTS if room == "tests" else MOST_LINES
    lengths = {name_of(p): len(p.read_text().splitlines()) for p in (ROOT / room).rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > limit} == {}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_no_function_is_longer_than_a_page(room):
    long = {}
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_LINES_OF_A_FUNCTION:
                    long[f"{name_of(path)}:{node.name}"] = length
    assert long == {}


def test_launchers_are_thin():
    files = [p for p in (ROOT / "launch").iterdir() if p.suffix in (".py", ".sh")]
    assert sum(len(p.read_text().splitlines()) for p in files) < MOST_LINES_OF_LAUNCH


def test_mixers_are_known_to_nobody():
    named = {}
    for path in (ROOT / "cpflare").rglob("*.py"):
        if name_of(path).startswith(MAY_NAME_MIXERS):
            continue
        lines = [line for line in path.read_text().splitlines() if MIXER.search(line)]
        if name_of(path) == "cpflare/sections.py":  # the default
            lines = [line for line in lines if not line.strip().endswith('= "flarepp"')]
        if lines:
            named[name_of(path)] = lines
    assert named == {}
