# extensions.sh LAYER OUT: compile LAYER/requirements.txt from source into wheels, with GENCODE's targets and JOBS compilers.
set -eu
layer=$1
out=$2
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The compiler of the row's `toolkit` wheels, or of its `devel_image`.
nvcc=$(find "$site/nvidia" -path '*/bin/nvcc' -print -quit)
CUDA_HOME=$(dirname "$(dirname "${nvcc:-/opt/cuda/bin/nvcc}")")
[ -x "$CUDA_HOME/bin/nvcc" ] || { echo "builder: the extensions stage has no nvcc: the row needs a toolkit with nvidia-cuda-nvcc, or a devel_image" >&2; exit 1; }
mv "$CUDA_HOME/bin/nvcc" "$CUDA_HOME/bin/nvcc.real"
cp /opt/build/extensions/nvcc "$CUDA_HOME/bin/nvcc"
chmod 755 "$CUDA_HOME/bin/nvcc"
# The CUDA wheels have no lib64 and no unversioned names, which the linker asks for.
[ -e "$CUDA_HOME/lib64" ] || ln -s lib "$CUDA_HOME/lib64"
for library in "$CUDA_HOME"/lib/lib*.so.*; do ln -sf "$(basename "$library")" "${library%%.so.*}.so"; done
export CUDA_HOME MAX_JOBS="$JOBS" GENCODE
export CAUSAL_CONV1D_FORCE_BUILD=TRUE  # never the wheel that its setup script guesses a URL for
sources=/opt/sources
mkdir -p "$out" "$sources"
cd "$sources"
python -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --require-hashes -r "$layer/requirements.txt"
for archive in *.tar.gz; do tar xzf "$archive"; done
for source in */; do
    echo "compiling ${source%/} with $JOBS jobs for $GENCODE"
    # A fixed directory, not pip's random one: -lineinfo writes paths into the code.
    python -m pip wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$out" "$sources/$source"
done
cuobjdump="$site/triton/backends/nvidia/bin/cuobjdump"
for wheel in "$out"/*.whl; do
    work=$(mktemp -d)
    python -m zipfile -e "$wheel" "$work"
    report="${wheel%.whl}.txt"
    { "$CUDA_HOME/bin/nvcc.real" --version | tail -n 2; gcc --version | head -n 1; echo "flags: $GENCODE"; } > "$report"
    find "$work" -name '*.so' | sort | while read -r library; do
        echo "library: $(basename "$library")" >> "$report"
        "$cuobjdump" --list-elf --list-ptx "$library" | sed 's/.*: *//' >> "$report"
    done
    rm -rf "$work"
done
