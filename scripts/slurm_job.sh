# Sourced by Slurm batch files: `ranks train.py ARGUMENTS...` runs it on all tasks of the job, hands
# the signal of --signal=B:USR1@SECONDS on to the ranks, which save and leave with status 75, and
# then puts the job back into the queue; the job goes on by --resume auto.
#
# One log a node: $LOGS/NAME-JOB.NUMBER.NODE.out. A job array (--array=1-20%1) needs no requeue: its
# next element goes on. Slurm looks at time limits every half minute or so, so the signal comes up to
# a minute early, and a requeued job may wait for two minutes before it can start. A file of
# --kill-switch that stays in place ends it for good: train.py then refuses to begin.

ranks() {
    local step status
    mkdir -p "$LOGS"
    # Since Slurm 22.05 srun no longer takes --cpus-per-task from the job. A signal that comes before
    # Python listens must not end it: SIGTERM, at the limit itself, comes as well.
    srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --open-mode=append --output="$LOGS/%x-%j.%n.%N.out" \
        env --ignore-signal=USR1 .venv/bin/python "$@" &
    step=$!
    trap 'kill -USR1 $step' USR1
    trap : TERM # the ranks have it too, and need this shell for the requeue
    while true; do # a signal ends `wait`, but not what it waits for
        wait $step && status=0 || status=$?
        kill -0 $step 2>/dev/null || break
    done
    echo "$(date +%FT%T) job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: status $status"
    if [ $status = 75 ] && [ -z "${SLURM_ARRAY_JOB_ID:-}" ]; then
        scontrol requeue "$SLURM_JOB_ID" # ends this shell, a moment later
        sleep 60
    fi
    return $status
}
