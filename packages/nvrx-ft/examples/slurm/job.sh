#!/bin/sh
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
# A job on many nodes, one launcher on each; what follows the script's name goes to the launchers:
#
#     sbatch --nodes=3 job.sh --nnodes 2:3 --nproc-per-node 8 --max-restarts 100 train.py
#
# When it fails it goes back into the queue, at most REQUEUES times (5); with exit code 93 the
# launchers say that another start would not help. With `sbatch --signal=B:USR1@120` and
# `--ft-preempt-signal SIGUSR1` ranks save and leave before the time is over, and the job is queued
# again. Each start has a record in this folder; `nvrx-report` shows it.
#
# With OVER, a file in a shared folder, nothing is queued again: of several jobs with one name and
# --dependency=singleton, or several tasks of an array (--array=0-2%1), the next one takes over until
# one of them has made that file. Of an array it is `over-JOB` by default.
#
# HEALTH_DIR, a shared folder, lets `nvrx-slurm-health` say whether Slurm drains nodes of this job.
set -u

id="$SLURM_JOB_ID"
end="scontrol requeue"
over="${OVER:-}"
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    id="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    over="${OVER:-over-$SLURM_ARRAY_JOB_ID}"
    # To the launchers each task is a job of its own: its nodes are not replaced together.
    unset SLURM_ARRAY_TASK_ID SLURM_ARRAY_JOB_ID
fi
if [ -n "$over" ]; then
    end=scancel
    if [ -e "$over" ]; then
        echo "job $id: another one has done the work"
        exit 0
    fi
fi

again="${SLURM_RESTART_COUNT:-0}"
NVRX_EVENT_DIR="$PWD/record-$SLURM_JOB_ID-$again"
export NVRX_EVENT_DIR
nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
store="$(echo "$nodes" | head -n 1)"
last="$(echo "$nodes" | tail -n 1)"

# Without the node of this script, Slurm (22.05) would keep a --no-kill job running for ever, with
# nothing in it. A watch on another node ends it then: the job is queued again, or the next one begins.
watch='
    trap "" USR1
    while sleep "$2"; do
        left="$(squeue --noheader --jobs="$3" --format=%N)" && [ -n "$left" ] || continue
        scontrol show hostnames "$left" | grep -qx "$1" || exec $4 "$3"
    done'
if [ "$store" != "$last" ]; then
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$last" --no-kill \
        sh -c "$watch" watch "$store" "${WATCH_S:-60}" "$id" "$end" &
fi
if [ -n "${HEALTH_DIR:-}" ]; then
    nvrx-slurm-health "$HEALTH_DIR" # what was said of the nodes of an earlier start is stale
    nvrx-slurm-health "$HEALTH_DIR" --every "${HEALTH_S:-60}" &
    set -- --ft-segment-health-check-dir "$HEALTH_DIR" "$@"
fi

told=no
trap 'told=yes; scancel --signal=USR1 "$id"' USR1

# A node that is lost (--no-kill) or a launcher that leaves does not end the others.
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 \
    ft_launcher --rdzv-endpoint "$store:29400" --rdzv-id "$SLURM_JOB_ID" "$@" &
step=$!
# A signal interrupts `wait`.
until
    wait "$step"
    code=$?
    ! kill -0 "$step" 2>/dev/null
do :; done

# srun's code is the highest of all; that of the last launcher to leave says how the job ended.
ended="$(nvrx-report "$NVRX_EVENT_DIR" --json | sed -n 's/^  "exit_code": \([0-9]*\),$/\1/p')"
code="${ended:-$code}"
echo "job $id, start $again: exit code $code"
if [ "$told" = no ]; then
    case "$code" in
    0 | 2 | 93) # done; wrong arguments; not to be started again
        [ -z "$over" ] || touch "$over"
        exit "$code"
        ;;
    esac
    [ -z "$over" ] || exit "$code" # the next one takes over
    echo "start $again: $code" >>"failed-$SLURM_JOB_ID"
    [ "$(wc -l <"failed-$SLURM_JOB_ID")" -le "${REQUEUES:-5}" ] || exit "$code"
fi
[ -z "$over" ] || exit 0
exec scontrol requeue "$SLURM_JOB_ID"
