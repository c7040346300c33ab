#!/usr/bin/env bash
# From nothing to a report: installs, makes the embedded data set, trains on 2 ranks, predicts whole
# surfaces, evaluates them and writes the report. Under 6 minutes on 2 CPU cores after installation.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
if [ ! -x "$venv/bin/cpflare" ]; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet "$(grep '^torch==' constraints.txt)"
    "$venv/bin/pip" install --quiet --constraint constraints.txt --editable .
fi
export PATH="$PWD/$venv/bin:$PATH"
export OMP_NUM_THREADS=1  # a thread a rank; torchrun would say so at length
start=$SECONDS

torchrun --standalone --nproc_per_node=2 train_cp.py "$@"
torchrun --standalone --nproc_per_node=2 launch/predict_cp.py runs/quickstart --split test \
    --out runs/quickstart/predictions
cpflare evaluate runs/quickstart/predictions --store data/quickstart/store
cpflare report runs/quickstart --predictions runs/quickstart/predictions
echo "done in $((SECONDS - start)) s: open runs/quickstart/report.html"
