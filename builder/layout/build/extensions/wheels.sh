# wheels.sh DIRECTORY: install the compiled extensions and load each, so that a symbol missing from this torch is found now.
set -eu
export PYC_INVALIDATION_MODE=UNCHECKED_HASH
/opt/build/install/uv pip install --quiet --no-cache --offline --no-deps --link-mode copy --compile-bytecode "$1"/*.whl
mkdir -p /opt/blackwell/extensions
cp "$1"/*.txt /opt/blackwell/extensions/
python - "$1" <<'PYTHON'
import ctypes, importlib.util, pathlib, sys, zipfile
import torch
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    for name in zipfile.ZipFile(wheel).namelist():
        if name.endswith(".so"):
            module = pathlib.PurePath(name).name.partition(".")[0]
            spec = importlib.util.find_spec(module)
            assert spec, f"{module} of {wheel.name} is not importable"
            importlib.util.module_from_spec(spec)
            print(f"loaded {module} against torch {torch.__version__}")
PYTHON
find /opt/venv/lib -name '__pycache__' -newermt "@$SOURCE_DATE_EPOCH" -path '*/__main__*' -delete
sh /opt/build/install/times.sh /opt/venv /opt/blackwell
