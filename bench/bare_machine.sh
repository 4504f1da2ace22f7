#!/usr/bin/env bash
# The README's promise, tried: a Debian 12 with Python, make, git and root, nothing else, with a Docker Engine of its own.
#
#   bench/bare_machine.sh DIRECTORY make image TRITON=3.7
#
# DIRECTORY (25 GB free) holds the machine's disk and keeps it between calls; delete it for a new machine. The machine is a set of
# namespaces (mounts, processes, network), so it needs root, mmdebstrap, ip and iptables here, and no container. It gets this host's apt
# sources, pip settings, proxies and certificates, as a company's machines have them, and a clean clone of this checkout's HEAD.
# Prints how long the command took.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,9p "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
disk=$(realpath -m "$1"); shift
root=$disk/root

if [ ! -e "$disk/ready" ]; then
    mkdir -p "$disk"
    mmdebstrap --variant=minbase --include=python3,make,ca-certificates,git bookworm "$root"
    touch "$disk/ready"
fi
rm -f "$root/etc/apt/sources.list"
for file in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/apt/keyrings /usr/share/keyrings /etc/pip.conf \
    /etc/ssl/certs/ca-certificates.crt /etc/resolv.conf /etc/hosts; do
    [ -e "$file" ] || continue
    mkdir -p "$root$(dirname "$file")"; cp -rLT "$file" "$root$file"
done
if [ -d "$root/root/repo" ]; then
    git -C "$root/root/repo" fetch -q "$here" HEAD && git -C "$root/root/repo" reset -q --hard FETCH_HEAD
else
    git clone -q --no-hardlinks "$here" "$root/root/repo"
fi

# Its own network, so that its docker0 is not this host's; out through this host.
space=bare$$; net=10.213.$(( $$ % 250 )).0/24; near=${net%.0/24}.1; far=${net%.0/24}.2
ip netns add "$space"
ip link add "$space" type veth peer name eth0 netns "$space"
ip addr add "$near/24" dev "$space"; ip link set "$space" up
ip -n "$space" addr add "$far/24" dev eth0; ip -n "$space" link set eth0 up; ip -n "$space" link set lo up
ip -n "$space" route add default via "$near"
echo 1 > /proc/sys/net/ipv4/ip_forward
rules=("nat POSTROUTING -s $net -j MASQUERADE" "filter FORWARD -i $space -j ACCEPT" "filter FORWARD -o $space -j ACCEPT")
rule() { read -r table rest <<< "$2"; chain=${rest%% *}; iptables -t "$table" "$1" "$chain" ${rest#* }; }
for text in "${rules[@]}"; do rule -I "$text"; done
finish() { for text in "${rules[@]}"; do rule -D "$text" || true; done; ip netns delete "$space" || true; ip link delete "$space" 2>/dev/null || true; }
trap finish EXIT

keep=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" LANG=C.UTF-8)
while read -r name; do keep+=("$name=${!name}"); done < <(compgen -e | grep -E '^(PIP|UV)_|_(proxy|PROXY)$|^SSL_CERT_FILE$|^DEBIAN_MIRROR$' | grep -v FIND_LINKS || true)
started=$(date +%s); rc=0
# (`ip netns exec` would hide the control groups behind a new /sys.) Processes of the machine, its daemons among them, end with the command: the process namespace goes.
nsenter --net="/run/netns/$space" unshare --mount --pid --ipc --uts --fork --kill-child bash -euc '
    root=$1; shift; hostname bare
    mount --make-rprivate /; mount --bind "$root" "$root"; cd "$root"
    mount -t proc proc proc; mount -t sysfs sys sys; mount --rbind /sys/fs/cgroup sys/fs/cgroup; mount --rbind /dev dev
    mount -t tmpfs run run; mount -t tmpfs tmp tmp
    mkdir -p mnt/old; pivot_root . mnt/old; /usr/bin/umount -l /mnt/old; rmdir /mnt/old
    cd /root/repo; exec env -i "$@"' bare "$root" "${keep[@]}" "$@" || rc=$?
echo "bare machine: '$*' ended with $rc after $(( $(date +%s) - started )) s" >&2
exit $rc
