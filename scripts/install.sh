#!/usr/bin/env bash
# Installs packages into a virtual environment: scripts/install.sh VENV INSTALLER PIP_ARGUMENTS...
# INSTALLER: uv, pip, or auto (uv where it is on PATH, else uv installed into the environment, else pip).
set -euo pipefail

venv=$1 installer=$2
shift 2
python=$venv/bin/python

case $installer in
auto | uv)
    if uv=$(command -v uv); then
        installer=uv
    elif uv=$venv/bin/uv && { [ -x "$uv" ] || "$python" -m pip install --quiet uv==0.13.9; }; then
        installer=uv
    elif [ "$installer" = uv ]; then
        echo "install.sh: no uv on PATH, and pip cannot install it; use INSTALLER=pip" >&2
        exit 1
    else
        installer=pip
    fi
    ;;
pip) ;;
*)
    echo "install.sh: INSTALLER is '$installer'; expected auto, uv or pip" >&2
    exit 1
    ;;
esac

if [ "$installer" = uv ]; then
    echo "== $uv pip install $*"
    exec "$uv" pip install --python "$python" "$@"
fi
echo "== pip install $*"
exec "$python" -m pip install "$@"
