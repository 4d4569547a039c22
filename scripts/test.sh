#!/usr/bin/env bash
# Installs the test dependencies and runs everything that CI runs: lint, types, and tests, three stages at a time.
#   bash scripts/test.sh                 everything, into the active virtual environment or into .venv
#   INSTALL=no bash scripts/test.sh      without installing
#   PYTHON=python3.12 bash scripts/test.sh
# Starts no stage after one has failed. The last line has the test counts and seconds of all stages.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 3
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # tests start many programs with the same modules

if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -d .venv ] || "${PYTHON:-python3}" -m venv .venv || exit 3
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

stage() { # stage NAME COMMAND...: runs it and notes its name in `failed` if it fails
    printf '\n=== %s ===\n' "$1"
    "${@:2}" || echo "$1" >>"$reports/failed"
}

ok() { # succeeds unless a stage has failed
    [ ! -e "$reports/failed" ]
}

background() { # background NAME COMMAND...: runs a stage while at most two others run, and shows its output at the end
    while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done
    ok || return 0
    printf '\n=== %s has started ===\n' "$1"
    (
        stage "$@" >"$reports/$1.log" 2>&1
        cat "$reports/$1.log"
    ) &
}

tests() { # tests NAME ARGUMENTS...: one pytest session; its counts go into the last line
    background "$1" python -m pytest -q --durations=10 --junitxml="$reports/$1.xml" "${@:2}"
}

# Three stages run at a time on two cores, because some tests wait for processes: quick stages first, then the one that
# waits most, then the longest, so that all end together.
quick="tests/house_rules tests/arguments tests/config"
long=(
    "tests/end_to_end tests/faults tests/recipes"
    "tests/parity"
    "tests/memory tests/memory_emulation"
    "tests/train"
    "tests/model tests/optim tests/moe"
    "tests/kernels"
)
all_long=${long[*]}

[ "${INSTALL:-yes}" = no ] || stage "install" bash scripts/install.sh test --no-compile
! ok || stage "lint" python -m ruff check .
background "types" python -m mypy
# shellcheck disable=SC2086
tests "house rules and flags" $quick
# shellcheck disable=SC2046,SC2086
tests "all other tests" tests $(printf -- '--ignore=%s ' $quick $all_long)
for folders in "${long[@]}"; do
    # shellcheck disable=SC2086
    tests "${folders//tests\//}" $folders
done
wait

failed=$(paste -sd, "$reports/failed" 2>/dev/null)
[ -z "$failed" ] || printf '\nstage "%s" failed\n' "$failed"
python - "$reports" "$failed" <<'PYTHON'
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

suites = [suite for path in Path(sys.argv[1]).glob("*.xml") for suite in xml.parse(path).getroot().iter("testsuite")]
total = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
seconds = sum(float(suite.get("time", 0)) for suite in suites)
passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
counts = {"failed": total["failures"], "passed": passed, "skipped": total["skipped"], "errors": total["errors"]}
text = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")
print(f"===== {text} in {seconds:.2f}s =====")
sys.exit(1 if sys.argv[2] or total["failures"] or total["errors"] or not passed else 0)
PYTHON
