# Sourced by Slurm batch files: `ranks train.py ARGUMENTS...` runs it on all tasks of the job and
# forwards the signal of --signal=B:USR1@SECONDS to the ranks, which save and exit with status 75.
# supervise.py starts them again in this allocation after a fault, on the nodes that are not at fault;
# SPARE_NODES=N of the job's nodes are left free for that. With none left it goes on with fewer, by
# the planner's layout for GPU (below), if a step takes at most MAX_SLOWDOWN (1.5) times as long. In
# the end scripts/requeue.py requeues the job if its next start, by --resume auto, can continue it:
# after 75 and after a lost rank, but not after scancel, a mistake or what supervise.py has stopped.
#
# MPI=pmix is for an Open MPI; without it srun has --mpi=pmi2 (docs/install.md). Neighbouring ranks, which
# are a tensor group, are on neighbouring cores of one socket (--distribution=block:block; Slurm's default
# deals them out to the sockets in turn). Each rank sees all GPUs of its node (--gpu-bind=none) and takes
# that of its local rank: ranks that see one GPU each cannot open their neighbours' memory.
#
# One log per node: $LOGS/NAME-JOB.NUMBER.NODE.out. A job array (--array=1-20%1) needs no requeue: its
# next element resumes. Slurm checks time limits about every 30 s, so the signal comes up to a minute
# early, and a requeued job may wait for two minutes before it starts. While the file of --kill-switch
# exists, train.py does not start again.
#
# With SEGMENTS=FILE, which `plan.py rampup --submit` sets, the segment's options replace those of the batch
# file, and at the end of a segment the next one's job is submitted, with its --nodes (scripts/growing_jobs.py).
#
# With GPU=NAME, a machine of hardware/, the run is rehearsed before srun, on CPU cores of the first
# node: rehearse.py, a process, 10 s to a minute. A run that it rejects ends here with status 2.
#
# A file that an installed trine-plan wrote sets TRINE_FOLDER, the folder of the package, and its TRINE_PYTHON.
TRINE_PYTHON=${TRINE_PYTHON:-.venv/bin/python}
TRINE_FOLDER=${TRINE_FOLDER:+$TRINE_FOLDER/} # none: this folder, which is a clone

ranks() {
    local words step status spare=${SPARE_NODES:-0} fewer=()
    mkdir -p "$LOGS"
    export SEGMENTS="${SEGMENTS:-${STAGES:-}}" # a job of version 0.3 or earlier has STAGES
    if [ -n "$SEGMENTS" ]; then
        words=$("$TRINE_PYTHON" "${TRINE_FOLDER}scripts/growing_jobs.py" words "$SEGMENTS" "$@") || return 2
        set -- "$@" $words # of the segment; none has a space in it
        echo "segment: $words"
    fi
    [ "${GPU:-none}" = none ] || not_rejected "$@" || return 2
    [ "${GPU:-none}" = none ] || fewer=(--gpu "$GPU" --max-slowdown "${MAX_SLOWDOWN:-1.5}")
    # Since Slurm 22.05 srun does not inherit --cpus-per-task from the job. A signal that comes before
    # Python handles it must not end it: SIGTERM follows at the limit.
    env --ignore-signal=USR1 "$TRINE_PYTHON" "${TRINE_FOLDER}supervise.py" --spare-nodes "$spare" "${fewer[@]}" -- \
        srun --mpi="${MPI:-pmi2}" --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --distribution=block:block --gpu-bind=none \
        --open-mode=append --output="$LOGS/%x-%j.%n.%N.out" \
        env --ignore-signal=USR1 "$TRINE_PYTHON" "$TRINE_FOLDER$@" &
    step=$!
    trap 'kill -USR1 $step' USR1
    trap : TERM # the ranks receive it too, and this shell waits until they have saved
    while true; do # a signal ends `wait`, but not the step
        wait $step && status=0 || status=$?
        kill -0 $step 2>/dev/null || break
    done
    echo "$(date +%FT%T) job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: status $status"
    "$TRINE_PYTHON" "${TRINE_FOLDER}scripts/requeue.py" "$status" "$@" || true # $status counts
    return $status
}

not_rejected() { # by the rehearsal; without an answer of it the run is started
    local status=0 began=$SECONDS finding
    echo "rehearsing on fake GPUs, $GPU: $LOGS/rehearsal.txt"
    rm -f "$LOGS/rehearsal.json"
    local nodes=$((SLURM_JOB_NUM_NODES - ${SPARE_NODES:-0}))
    "$TRINE_PYTHON" "${TRINE_FOLDER}rehearse.py" --gpus $((nodes * SLURM_NTASKS_PER_NODE)) \
        --nodes "$nodes" --gpu "$GPU" --json "$LOGS/rehearsal.json" "${@:2}" \
        >"$LOGS/rehearsal.txt" 2>&1 || status=$?
    if [ $status = 0 ]; then
        echo "rehearsed in $((SECONDS - began)) s: all operations of the ranks that were run match, and it fits"
    elif [ $status = 1 ] && [ -f "$LOGS/rehearsal.json" ]; then
        finding=$("$TRINE_PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["finding"])' \
            <"$LOGS/rehearsal.json")
        echo "error: the rehearsal rejects this run: $finding; GPU=none sbatch ... skips it" >&2
        return 2
    else
        echo "not rehearsed, the run decides: $(tail -n 1 "$LOGS/rehearsal.txt")"
    fi
}
