#!/usr/bin/env bash
# What every SLURM job does. tools/launch.py puts the job's own part above it: the #SBATCH lines, the environment,
# and root, python, run_dir, grace, excluded, container, needed and flags.
# shellcheck disable=SC2154
set -uo pipefail

stopped=""
trap 'stopped=yes' TERM # SLURM ends the whole job, batch script included: cancelled, or past its time limit

# srun leaves its tasks one core each unless it is told, since SLURM 22.05
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

echo "job $SLURM_JOB_ID, restarted ${SLURM_RESTART_COUNT:-0} times, on $SLURM_JOB_NODELIST"
# shellcheck disable=SC2016
check='for path; do [ -e "$path" ] || { echo "$path does not exist on $(hostname)" >&2; exit 3; }; done'
srun --ntasks="${SLURM_JOB_NUM_NODES:-1}" --ntasks-per-node=1 bash -c "$check" check "${needed[@]}" || exit 3
since=$(date +%s)
code=0
# the first rank to leave may not end the others: rank 0 may still commit a checkpoint; but none waits for ever
srun --kill-on-bad-exit=0 --wait="$grace" "${container[@]}" "$python" "$root/pretrain_moe.py" "${flags[@]}" || code=$?
[ "$code" != 0 ] || exit 0
[ -z "$stopped" ] || exit "$code"

# the run's own report decides whether another start may mend it
answer=$(srun --nodes=1 --ntasks=1 "${container[@]}" "$python" "$root/tools/requeue.py" \
    --run-dir "$run_dir" --exit-code "$code" --since "$since")
again=$?
echo "$answer"
[ "$again" = 0 ] && [ -z "$stopped" ] || exit "$code"
suspect=$(sed -n 's/^suspected host: //p' <<<"$answer")
[ -z "$suspect" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${excluded:+$excluded,}$suspect"
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
