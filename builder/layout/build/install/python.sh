# python.sh MAJOR.MINOR: the virtual environment that everything is installed into, from the base's own Python.
set -eu
wanted=$1
found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none)
if [ "$found" != "$wanted" ]; then
    echo "builder: the base brings Python $found, the matrix says $wanted; correct the base's row" >&2
    exit 1
fi
for need in gcc g++ ldconfig; do
    command -v "$need" >/dev/null || { echo "builder: the base has no $need, which Triton or Inductor need for a user's own kernels; add it to the base" >&2; exit 1; }
done
include=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$include/Python.h" ] || { echo "builder: the base has no Python.h: without it FLA falls back to the CPU; add the Python headers to the base" >&2; exit 1; }
/opt/build/install/uv venv --quiet --no-cache --no-config --no-python-downloads --python "$(command -v python3)" /opt/venv
sh /opt/build/install/times.sh /opt/venv
