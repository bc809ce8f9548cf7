# The VM's one job: devices, the command, and its exit code for the host. (vm.py writes /run/job/job.sh.)
exec </dev/null >/dev/hvc0 2>&1
stty -F /dev/hvc0 raw -echo
. /run/job/job.sh
echo "$HOSTNAME" >/proc/sys/kernel/hostname
ulimit -l unlimited
if bash "$ROOT/tests/rdma/devices.sh"; then
    cd "$ROOT"
    touch /run/job/began
    (job)
    echo $? >/run/job/code
else
    dmesg | tail -n 20
    echo "the RDMA devices could not be made; above is what the kernel says"
fi
sync
echo o >/proc/sysrq-trigger
sleep 60
