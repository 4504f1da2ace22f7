# finish.sh: let torch ask for an overriding Triton, make our own commands callable, and arm the start-up hook.
set -eu
python /opt/build/finish/override.py
site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '/opt/blackwell/inside\nimport blackwell.startup\n' > "$site/blackwell.pth"
printf '#!/opt/venv/bin/python\nimport sys\nfrom blackwell.cli import main\nsys.exit(main())\n' > /opt/venv/bin/blackwell
chmod 755 /opt/venv/bin/blackwell /opt/blackwell/entrypoint
BLACKWELL_STARTUP=0 python -m compileall -q --invalidation-mode unchecked-hash /opt/blackwell/inside
sh /opt/build/install/times.sh /opt/venv /opt/blackwell
