#!/bin/sh
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
# A job whose nodes are the tasks of an array, so that Slurm replaces each on its own. The launchers
# meet at `nvrx-control`, which runs on a machine that does not train and says when all is over:
#
#     job=$(sbatch --parsable --array=0-3 --nodes=2 array.sh HOST:29400 --nnodes 8 train.py)
#     nvrx-control --nnodes 8 --rdzv-endpoint HOST:29400 --rdzv-id "$job" && touch "over-$job"
#
# A task whose launchers left alone, such as those of an unfit node, is queued again.
set -u

endpoint="$1"
shift
again="${SLURM_RESTART_COUNT:-0}"
if [ -e "over-$SLURM_ARRAY_JOB_ID" ]; then
    echo "task $SLURM_ARRAY_TASK_ID, start $again: the job is over"
    exit 0
fi

# Tasks with nodes that Slurm drains take no part in the next round (HEALTH_DIR: a shared folder).
if [ -n "${HEALTH_DIR:-}" ]; then
    nvrx-slurm-health "$HEALTH_DIR" # what was said of the nodes of an earlier start is stale
    nvrx-slurm-health "$HEALTH_DIR" --every "${HEALTH_S:-60}" &
    set -- --ft-segment-health-check-dir "$HEALTH_DIR" "$@"
fi

# The nodes of a task belong together: when one launcher leaves, all do.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    ft_launcher --rdzv-endpoint "$endpoint" --rdzv-id "$SLURM_ARRAY_JOB_ID" "$@"
code=$?
echo "task $SLURM_ARRAY_TASK_ID, start $again: exit code $code"
case "$code" in
0 | 2 | 93) exit "$code" ;; # done; wrong arguments; not to be started again
esac
failed="failed-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"
echo "start $again: $code" >>"$failed"
[ "$(wc -l <"$failed")" -le "${REQUEUES:-5}" ] || exit "$code"
exec scontrol requeue "$SLURM_JOB_ID"
