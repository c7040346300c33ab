#!/usr/bin/env bash
# Sets up an environment, then lints, type-checks, checks the direction of imports and runs all tests.
# Arguments go to pytest:  bash tests/run.sh -k encode
# With --fast, for the inner loop, it runs a sample of the tests (tests/conftest.py says which), and sets
# up the environment only where what it is made of has changed.
# With INSTALL_PACKAGES=1, as root on Debian, it installs SLURM, iproute2 and g++ for the tests that need them;
# elsewhere those are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
packages=(slurmctld slurmd slurm-client munge iproute2 g++)
if [ "${INSTALL_PACKAGES:-0}" = 1 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
    ! dpkg --status "${packages[@]}" >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install --yes --no-install-recommends "${packages[@]}"; } >/dev/null ||
        echo "notice: ${packages[*]} can't be installed; their tests are skipped" >&2
fi
stamp="$venv/installed.sum"
if [[ " $* " != *" --fast "* ]] || ! sha256sum --quiet --check "$stamp" >/dev/null 2>&1; then
    # The wanted torch first and by itself: its version decides between a CPU and a CUDA build.
    "$venv/bin/pip" install --quiet "$(grep '^torch==' constraints.txt)"
    "$venv/bin/pip" install --quiet --constraint constraints.txt --editable '.[test]'
    sha256sum "$PWD/pyproject.toml" "$PWD/constraints.txt" >"$stamp"
fi

"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/lint-imports"
# Two workers, a file of tests each at a time: most tests use one core, or wait.
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
