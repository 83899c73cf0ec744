#!/bin/busybox sh
# The first program of a guest: mounts what everything needs, runs the test's script (an archive of
# the test's own brings it) and ends the machine.
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev 2>/dev/null
mount -t tmpfs none /tmp
ip link set lo up

# The test hears what goes to descriptor 3: the second serial line, or the console where there is
# none.
talk=/dev/ttyS1
grep -q con0=fd /proc/cmdline && talk=/dev/console
exec 3<>$talk
stty raw -echo <&3

cat > /tmp/lib.sh <<'LIB'
say() { echo "$*" >&3; }
# What comes in on standard input, as the result of that name.
give() { say "begin $1"; cat >&3; say "end $1"; }
# A line of the test's; with a word, that line.
hear() {
    read -r line <&3
    [ "${1:-$line}" = "$line" ] || { echo "heard '$line', not '$1'"; return 1; }
}
LIB

cd /tmp
sh -e -c '. /tmp/lib.sh; . /run.sh' > /tmp/out 2>&1
status=$?
. /tmp/lib.sh
cat /tmp/out > /dev/console
[ $status = 0 ] || give output < /tmp/out
say "done $status"
poweroff -f
