#!/usr/bin/env bash
# Sets up an environment, then lints, type-checks, checks the direction of imports and runs all tests.
# Arguments go to pytest:  bash tests/run.sh -k encode
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
# The wanted torch first and by itself: its version decides between a CPU and a CUDA build.
"$venv/bin/pip" install --quiet "$(grep '^torch==' constraints.txt)"
"$venv/bin/pip" install --quiet --constraint constraints.txt --editable '.[test]'

"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/lint-imports"
exec "$venv/bin/python" -m pytest "$@"
