#!/usr/bin/env bash
# A surface of 8,200,000 cells as one exact training sample on 2 ranks, and its prediction by one rank in a single pass:
# makes the data once, runs both, and says how long they took and what they held.
#     bash benchmarks/full_surface.sh [--cells 8200000] [--dir data/full_surface] [--out studies/executors]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" > /dev/null || python=python3
exec "$python" -m benchmarks.full_surface "$@"
