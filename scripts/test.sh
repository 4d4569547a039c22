#!/usr/bin/env bash
# Installs the test dependencies and runs everything that CI runs: lint, types, then tests from fast to slow.
#   bash scripts/test.sh                 everything, into the active virtual environment or into .venv
#   INSTALL=no bash scripts/test.sh      without installing
#   PYTHON=python3.12 bash scripts/test.sh
# Stops at the first stage that fails. The last line has the test counts and seconds of all stages.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 3
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -d .venv ] || "${PYTHON:-python3}" -m venv .venv || exit 3
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
failed=""

stage() { # stage NAME COMMAND...: runs it unless an earlier stage failed
    local name=$1
    shift
    [ -z "$failed" ] || return 0
    printf '\n=== %s ===\n' "$name"
    "$@" || failed=$name
}

background() { # background NAME COMMAND...: runs it alongside the next stage unless an earlier one failed; see `join`
    [ -z "$failed" ] || return 0
    other=$1
    "${@:2}" >"$reports/other.log" 2>&1 &
    process=$!
}

join() { # waits for the background stage and shows its output
    [ -n "${process:-}" ] || return 0
    wait "$process" || failed=${failed:+$failed, }$other
    process=""
    printf '\n=== %s ===\n' "$other"
    cat "$reports/other.log"
}

tests() { # tests REPORT ARGUMENTS...: one pytest session; its counts go into the last line
    python -m pytest -q --durations=10 --junitxml="$reports/$1.xml" "${@:2}"
}

existing() { # existing PATH...: the paths that exist
    for path in "$@"; do
        [ ! -e "$path" ] || printf '%s ' "$path"
    done
}

quick=$(existing tests/house_rules tests/arguments tests/config tests/helpers/test_tolerances.py)
whole_runs=$(existing tests/parity tests/end_to_end tests/faults tests/recipes tests/memory_emulation) # half of the time

[ "${INSTALL:-yes}" = no ] || stage "install" bash scripts/install.sh test
stage "lint" python -m ruff check .
# two stages run at a time, since each keeps about one core busy
background "types" python -m mypy
# shellcheck disable=SC2086
stage "house rules and flags" tests quick $quick
join
# shellcheck disable=SC2086
[ -z "$whole_runs" ] || background "parity and whole runs" tests whole_runs $whole_runs
# shellcheck disable=SC2046,SC2086
stage "all other tests" tests others tests $(printf -- '--ignore=%s ' $quick $whole_runs)
join

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
