# install.sh LAYER: install LAYER/requirements.txt (every hash checked), then remove the dead weight that LAYER/prune.txt names.
set -eu
layer=$1
export PYC_INVALIDATION_MODE=UNCHECKED_HASH  # byte code that is never stale and carries no times
/opt/build/install/uv pip install --quiet --no-deps --require-hashes --no-build --link-mode copy --compile-bytecode -r "$layer/requirements.txt"
if [ -s "$layer/prune.txt" ]; then
    cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    while read -r what glob; do
        for path in $glob; do
            [ -e "$path" ] || continue  # a glob that matches nothing stays itself
            case $what in
                files) rm -rf -- "$path" ;;
                symbols) strip --strip-unneeded -- "$path" ;;
                *) echo "prune.txt: what is $what?" >&2; exit 1 ;;
            esac
        done
    done < "$layer/prune.txt"
fi
sh /opt/build/install/times.sh /opt/venv
