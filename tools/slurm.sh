#!/bin/sh
# A real Slurm on one machine for tests, without systemd; all its files lie in one folder.
#
#   slurm.sh install             Debian's and Ubuntu's slurm-wlm and munge (needs root or sudo)
#   slurm.sh start DIR [NODES]   a cluster of one node or more, all of them on this machine
#   slurm.sh stop DIR            ends its jobs and its daemons
#
# For a cluster whose nodes are network namespaces of one machine, each with a host name:
#
#   slurm.sh config DIR CONTROLLER NAME=ADDRESS...   once, anywhere
#   slurm.sh controller DIR                          in the controller's namespace
#   slurm.sh node DIR NAME                           in each node's, the controller's as well
#   slurm.sh wait DIR                                until all nodes are idle
#
# Then `SLURM_CONF=DIR/slurm.conf srun ...`. Run it as root. Daemons listen at SLURM_PORT (16817)
# and, nodes, at the ports after it.
set -eu

deadline_s=30

die() {
    echo "slurm.sh: $*" >&2
    exit 1
}

install() {
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root="sudo"
    if [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && [ -x /usr/sbin/munged ]; then
        echo "found $(/usr/sbin/slurmctld -V)"
        return
    fi
    command -v apt-get >/dev/null || die "there is no apt-get here: install Slurm in another way"
    export DEBIAN_FRONTEND=noninteractive
    $as_root apt-get -q update
    $as_root apt-get -q install -y --no-install-recommends slurm-wlm munge
    /usr/sbin/slurmctld -V
}

# Writes what all hosts share. Each node is NAME=ADDRESS, or NAME=ADDRESS:PORT where several nodes
# are on this host.
config() {
    controller="$1"
    shift
    port="${SLURM_PORT:-16817}"
    address="$controller"
    nodes=""
    for pair in "$@"; do
        name="${pair%%=*}"
        place="${pair#*=}"
        own=""
        case "$place" in
        *:*) own="NodeHostname=$(hostname -s) Port=${place#*:}" ;;
        esac
        place="${place%%:*}"
        [ "$name" = "$controller" ] && address="$place"
        # More processors than there may be: tests want slots, not speed.
        nodes="${nodes}NodeName=$name NodeAddr=$place $own CPUs=8 RealMemory=1000 State=UNKNOWN
"
    done
    umask 022
    mkdir -p "$dir/state" "$dir/munge"
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
    # A requeued job waits for as long as credentials live: 120 s if not told otherwise.
    cat >"$dir/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$controller($address)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdSpoolDir=$dir/%n.spool
SlurmdPidFile=$dir/%n.pid
SlurmdLogFile=$dir/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
JobRequeue=1
ReturnToService=2
KillWait=2
SlurmdTimeout=10
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
${nodes}PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

controller() {
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
        --pid-file="$dir/munge/pid" --seed-file="$dir/munge/seed" --log-file="$dir/munge/log"
    slurmctld -f "$dir/slurm.conf"
}

node() {
    slurmd -f "$dir/slurm.conf" -N "$1"
}

# Calls a command until it succeeds or too much time has passed.
until_true() {
    end=$(($(date +%s) + deadline_s))
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.1
    done
}

all_idle() {
    states="$(sinfo -h -N -o %T 2>/dev/null)" && [ -n "$states" ] &&
        ! echo "$states" | grep -qv '^idle$'
}

no_jobs() {
    [ -z "$(squeue -h 2>/dev/null)" ]
}

wait_idle() {
    until_true all_idle || die "the nodes are not idle after $deadline_s s; see the logs in $dir"
}

start() {
    count="${1:-1}"
    port="${SLURM_PORT:-16817}"
    here="$(hostname -s)"
    pairs=""
    number=1
    while [ "$number" -le "$count" ]; do
        pairs="$pairs node$number=127.0.0.1:$((port + number))"
        number=$((number + 1))
    done
    # shellcheck disable=SC2086 # words are meant
    config "$here" $pairs
    sed -i "s/^SlurmctldHost=.*/SlurmctldHost=$here(127.0.0.1)/" "$dir/slurm.conf"
    controller
    number=1
    while [ "$number" -le "$count" ]; do
        node "node$number"
        number=$((number + 1))
    done
    wait_idle
}

pids() {
    for file in "$dir"/*.pid "$dir/munge/pid"; do
        [ ! -s "$file" ] || cat "$file"
    done
}

gone() {
    for pid in "$@"; do
        ! kill -0 "$pid" 2>/dev/null || return 1
    done
}

stop() {
    if [ -S "$dir/munge/socket" ]; then
        scancel --quiet --signal=KILL --full -u root 2>/dev/null || true
        scancel --quiet -u root 2>/dev/null || true
        until_true no_jobs || true
    fi
    all="$(pids)"
    for pid in $all; do
        kill "$pid" 2>/dev/null || true
    done
    # shellcheck disable=SC2086 # words are meant
    until_true gone $all || kill -9 $all 2>/dev/null || true
}

[ $# -ge 1 ] || die "say what to do: install, start, stop, config, controller, node or wait"
command="$1"
shift
PATH="$PATH:/usr/sbin:/sbin"
if [ "$command" = install ]; then
    install
    exit
fi
[ $# -ge 1 ] || die "$command: say in which folder"
mkdir -p "$1"
dir="$(cd "$1" && pwd)"
shift
export SLURM_CONF="$dir/slurm.conf"
case "$command" in
wait) wait_idle ;;
start | stop | config | controller | node) "$command" "$@" ;;
*) die "$command is none of install, start, stop, config, controller, node, wait" ;;
esac
