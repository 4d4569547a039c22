#!/usr/bin/env bash
# Starts a run with torchrun: on this machine, or on each of several.
#   bash scripts/launch.sh --recipe quickstart --run-dir runs/mine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash scripts/launch.sh --config my.yaml --run-dir /shared/mine    (and NODE_RANK=1)
# tools/launch.py writes scripts that call this one, with everything set. Variables:
#   RANKS_PER_NODE  processes on this machine; not set: one per GPU, or one
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   machines; this one, counted from 0; where they meet
#   RUN_DIR         the run's folder; with it, a run that ended for a reason that may go away is started again
#   MAX_RESTARTS    how often at most (2). On one machine only: of several, the scheduler must restart all
#   GRACE           seconds that torchrun leaves ranks for saving after a signal (30; to change it needs torch 2.13)
#   PYTHON          the interpreter (python)
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
nnodes=${NNODES:-1}
run_dir=${RUN_DIR:-}
max_restarts=${MAX_RESTARTS:-2}

gpus() { # how many GPUs of this machine the ranks can use, at least 1
    local found=0 visible
    ! command -v nvidia-smi >/dev/null || found=$(nvidia-smi --list-gpus | grep -c '^GPU')
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # nvidia-smi does not read this variable
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        [ "${#visible[@]}" -ge "$found" ] || found=${#visible[@]}
    fi
    echo $((found > 0 ? found : 1))
}

where=(--nnodes "$nnodes" --nproc-per-node "${RANKS_PER_NODE:-$(gpus)}")
if [ "$nnodes" = 1 ]; then
    where+=(--standalone)
else
    : "${NODE_RANK:?set NODE_RANK, the number of this machine, less than NNODES=$nnodes}"
    : "${MASTER_ADDR:?set MASTER_ADDR, the name of machine 0}"
    where+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
    max_restarts=0
fi
[ -z "${GRACE:-}" ] || where+=(--shutdown-timeout "$GRACE")

child=""
stopped=""
stop() { # stop SIGNAL: passes it to torchrun, which sends it to its ranks and gives them time to save
    stopped=yes
    [ -z "$child" ] || kill -s "$1" "$child"
}
trap 'stop INT' INT
trap 'stop TERM' TERM HUP

run() { # one start, until torchrun has ended; a signal ends the first wait early
    # Job control gives torchrun a process group of its own: it receives a Ctrl-C once, from stop(). Both from stop() and
    # from the terminal, it would end before its ranks. Without job control, it would ignore SIGINT.
    set -m
    "$python" "$root/tools/torchrun.py" "${where[@]}" "$root/pretrain_moe.py" "$@" &
    child=$!
    set +m
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    child=""
}

for ((start = 0; ; start++)); do
    since=$(date +%s)
    run "$@"
    [ "$code" != 0 ] || exit 0
    [ -n "$run_dir" ] && [ -z "$stopped" ] && [ "$start" -lt "$max_restarts" ] || exit "$code"
    "$python" "$root/tools/requeue.py" --run-dir "$run_dir" --exit-code "$code" --since "$since" || exit "$code"
    [ -z "$stopped" ] || exit "$code"
done
