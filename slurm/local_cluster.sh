#!/usr/bin/env bash
# A SLURM cluster of two nodes that are both this machine, without systemd, to try the batch scripts:
#
#     apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
#     bash slurm/local_cluster.sh start && export SLURM_CONF="$(bash slurm/local_cluster.sh conf)"
#     sbatch --nodes=2 --partition=low slurm/train_cp.sbatch my.yaml run.dir=runs/try
#     bash slurm/local_cluster.sh stop
#
# Run it as root, on a machine of your own: jobs run as root. Jobs of partition `high` preempt those
# of `low`, which get GRACE seconds of warning and go back into the queue.
# Settings: STATE (folder of the cluster's files; cpflare-slurm in TMPDIR unless set), CPUS (that SLURM shall believe each node to have),
# GRACE, PORT (the first of three).
set -euo pipefail

state="${STATE:-$(dirname "$(mktemp -u)")/cpflare-slurm}"
cpus="${CPUS:-4}"
grace="${GRACE:-60}"
port="${PORT:-16817}"
node="$(hostname -s)" # the other one is localhost: two names that this machine can resolve
conf="$state/slurm.conf"

fail() {
    echo "error: $1" >&2
    exit 1
}

write_conf() {
    cat >"$conf" <<EOF
ClusterName=cpflare
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmctldPort=$port
AuthType=auth/munge
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/node-%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd-%n.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd-%n.log
# No control groups: processes are followed by their parents.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=300
KillWait=30
MinJobAge=3600
NodeName=$node NodeHostname=$node NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=$cpus State=UNKNOWN
NodeName=localhost NodeHostname=$node NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=$cpus State=UNKNOWN
PartitionName=low Nodes=$node,localhost Default=YES PriorityTier=1 GraceTime=$grace MaxTime=INFINITE State=UP
PartitionName=high Nodes=$node,localhost PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
EOF
}

start_munge() {
    if munge -n </dev/null >/dev/null 2>&1; then
        return
    fi
    if [ ! -s /etc/munge/munge.key ]; then
        dd if=/dev/urandom of=/etc/munge/munge.key bs=1024 count=1 status=none
        chown munge:munge /etc/munge/munge.key
        chmod 400 /etc/munge/munge.key
    fi
    install -d -o munge -g munge -m 755 /run/munge
    # munged refuses to run as root.
    setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged
    touch "$state/munged_is_ours"
}

start() {
    [ "$(id -u)" = 0 ] || fail "run it as root"
    for command in slurmctld slurmd sbatch munged; do
        PATH="$PATH:/usr/sbin" command -v "$command" >/dev/null ||
            fail "$command is missing; apt-get install slurmctld slurmd slurm-client munge"
    done
    [ ! -e "$state/slurmctld.pid" ] || fail "a cluster of $state is running; stop it first"
    mkdir -p "$state/controller" "$state/node-$node" "$state/node-localhost"
    write_conf
    export SLURM_CONF="$conf"
    start_munge
    cd "$state" # the daemons' working folder
    /usr/sbin/slurmctld -c
    /usr/sbin/slurmd -c -N "$node"
    /usr/sbin/slurmd -c -N localhost
    for _ in $(seq 60); do
        if [ "$(sinfo --noheader --format='%D %T' --partition=low 2>/dev/null)" = "2 idle" ]; then
            echo "$conf"
            return
        fi
        sleep 0.5
    done
    tail -n 5 "$state"/*.log >&2 || true
    stop
    fail "the nodes did not come up"
}

stop() {
    export SLURM_CONF="$conf"
    if [ ! -e "$conf" ]; then
        return
    fi
    scancel --user=root --quiet 2>/dev/null || true
    for _ in $(seq 20); do
        [ -n "$(squeue --noheader --states=running,completing 2>/dev/null)" ] || break
        sleep 0.25
    done
    for file in "$state"/*.pid; do
        [ ! -s "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
    for _ in $(seq 40); do
        compgen -G "$state/*.pid" >/dev/null || break
        sleep 0.25
    done
    if [ -e "$state/munged_is_ours" ]; then
        setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged --stop || true
    fi
    rm -rf "$state"
}

case "${1:-}" in
start) start ;;
stop) stop ;;
conf) echo "$conf" ;;
*) fail "usage: bash slurm/local_cluster.sh start | stop | conf" ;;
esac
