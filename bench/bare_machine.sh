#!/usr/bin/env bash
# The README's promise, tried: a Debian 12 with Python, make and root, nothing else, in a privileged container with a Docker Engine of its own.
#
#   bench/bare_machine.sh DIRECTORY make image TRITON=3.7
#
# DIRECTORY (20 GB free) keeps the machine's disk between calls: delete it for a new machine. The machine gets this host's apt sources,
# pip settings and certificates, as a company's machines have them, and a clean clone of this checkout's HEAD. Prints the time it took.
set -euo pipefail
[ $# -ge 2 ] || { sed -n 2,7p "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
disk=$(realpath -m "$1"); shift
engine=/usr/bin/docker
mkdir -p "$disk/docker" "$disk/root"

if ! "$engine" image inspect blackwell-bare-machine >/dev/null 2>&1; then
    mmdebstrap --variant=apt --include=python3,make,ca-certificates,git bookworm - | "$engine" import --change 'WORKDIR /root/repo' - blackwell-bare-machine >/dev/null
fi

# The clone travels as files, so that nothing of this host is mounted but the disk.
rm -rf "$disk/root/repo.new"; git clone -q --no-hardlinks "$here" "$disk/root/repo.new"
[ -d "$disk/root/repo" ] && mv "$disk/root/repo.new/.git" "$disk/root/.git.new" && rm -rf "$disk/root/repo/.git" "$disk/root/repo.new" \
    && mv "$disk/root/.git.new" "$disk/root/repo/.git" && git -C "$disk/root/repo" reset -q --hard \
    || mv "$disk/root/repo.new" "$disk/root/repo"

mounts=(); environment=()
for file in /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/pip.conf /etc/ssl/certs/ca-certificates.crt /etc/apt/keyrings /usr/share/keyrings; do
    [ -e "$file" ] && mounts+=(--volume "$file:$file:ro")
done
while read -r name; do environment+=(--env "$name"); done < <(compgen -e | grep -E '^(PIP|UV)_|_proxy$|_PROXY$|^SSL_CERT_FILE$|^DEBIAN_MIRROR$' || true)
started=$(date +%s)
rc=0
"$engine" run --rm --privileged --volume "$disk/docker:/var/lib/docker" --volume "$disk/root:/root" "${mounts[@]}" "${environment[@]}" \
    --workdir /root/repo blackwell-bare-machine "$@" || rc=$?
echo "bare machine: '$*' ended with $rc after $(( $(date +%s) - started )) s" >&2
exit $rc
