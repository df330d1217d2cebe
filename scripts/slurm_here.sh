#!/usr/bin/env bash
# Runs a command with a Slurm of three nodes, n1 to n3, all of them on this machine:
#
#     bash scripts/slurm_here.sh bash scripts/test.sh --all --need-slurm
#     bash scripts/slurm_here.sh srun --mpi=pmi2 -N2 -n4 .venv/bin/python train.py ...
#     bash scripts/slurm_here.sh bash                      a shell in which srun and sbatch work
#
# It has daemons, ports, a key and files of its own, which are removed when the command ends; a Slurm
# that the machine already has is not used. Needs root; if slurmctld or munged is missing, apt-get
# installs it. SLURM_HERE_NODES=2 makes two nodes.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: bash scripts/slurm_here.sh COMMAND..." >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "error: slurmd starts tasks for others: it needs root" >&2; exit 2; }

if ! command -v slurmctld munged >/dev/null; then
    echo "installing slurm-wlm and munge" >&2
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    # The packages want to start services; nothing here can start them.
    { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; } \
        >"$log" 2>&1 || { cat "$log" >&2; echo "error: apt-get could not install Slurm" >&2; exit 2; }
    rm "$log"
fi

state=$(mktemp -d /tmp/slurm-here.XXXXXX)
chmod 755 "$state"
nodes=${SLURM_HERE_NODES:-3}
daemons=()
stop() {
    # slurmd does not end running steps when it ends: cancel them first. A slurmstepd whose slurmctld
    # has gone stays for ever: wait longer than KillWait.
    scancel --quiet --full --signal=KILL --user=root && scancel --quiet --user=root
    for _ in $(seq 400); do
        [ -n "$(squeue --noheader 2>&1)" ] || break
        sleep 0.1
    done
    daemons+=($(cat "$state"/slurmd-*.pid)) # of one that was started again too
    kill "${daemons[@]}"
    for _ in $(seq 100); do
        kill -0 "${daemons[@]}" || break
        sleep 0.1
    done
    kill -KILL "${daemons[@]}"
    rm -rf "$state"
}
daemon() {
    setsid "$@" >>"$state/log/output" 2>&1 & # a session of its own: Ctrl-C must reach the command only
    daemons+=($!)
    disown $! # of a slurmd that a test has killed bash would say so, after the command's last line
}
trap 'status=$?; set +e; stop >/dev/null 2>&1; exit $status' EXIT
trap 'exit 143' TERM HUP

ports=$(python3 - "$nodes" <<'PYTHON'
import random, socket, sys
sockets = []
while len(sockets) < 1 + int(sys.argv[1]):
    one = socket.socket()
    try:  # below the ports of outgoing connections, one of which could be there before the daemon
        one.bind(("", random.randrange(10_000, 30_000)))
    except OSError:  # in use
        continue
    sockets.append(one)
print(*(one.getsockname()[1] for one in sockets))
PYTHON
)
host=$(hostname)
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc reads these two
mkdir "$state/ctld" "$state/log"
(umask 077 && head -c 1024 /dev/urandom >"$state/munge.key")
export SLURM_CONF=$state/slurm.conf
{
    cat <<CONF
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports%% *}
SlurmUser=root
# A requeued job waits until its credential expires: 5 s here, two minutes by default.
AuthInfo=socket=$state/munge.socket,cred_expire=5
# MPICH names shared memory by job: do not reuse the names of an earlier Slurm's killed jobs.
FirstJobId=$((RANDOM + 1))
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/log/slurmctld
SlurmdLogFile=$state/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
# The number of CPUs below counts, not the sockets, cores and threads of the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
# The job of a killed salloc or srun ends within about twice as many seconds: it keeps no nodes.
InactiveLimit=30
# The default: seconds between SIGTERM at the time limit and SIGKILL.
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=2
PartitionName=here Nodes=ALL Default=YES MaxTime=INFINITE
CONF
    number=0
    for port in ${ports#* }; do
        number=$((number + 1))
        echo "NodeName=n$number NodeAddr=127.0.0.1 NodeHostname=$host Port=$port" \
            "CPUs=$cores SocketsPerBoard=1 CoresPerSocket=$cores"
    done
} >"$SLURM_CONF"

daemon munged --foreground --force --key-file="$state/munge.key" \
    --socket="$state/munge.socket" --pid-file="$state/munged.pid" --seed-file="$state/munge.seed"
daemon slurmctld -D
for number in $(seq "$nodes"); do daemon slurmd -D -N "n$number"; done
for _ in $(seq 150); do
    [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = "$nodes" ] && break
    sleep 0.2
done
[ "$(sinfo --noheader --states=idle --format=%D)" = "$nodes" ] || {
    sinfo >&2
    tail -n 20 "$state"/log/* >&2
    echo "error: the $nodes nodes are not idle after 30 s" >&2
    exit 2
}
"$@"
