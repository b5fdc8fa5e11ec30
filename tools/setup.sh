#!/usr/bin/env bash
# Makes a virtual environment and installs draftproof into it:  setup.sh VENV cpu|gpu TORCH_VERSION EXTRAS
set -euo pipefail
venv=$1 flavour=$2 torch=$3 extras=$4

find_python() {
    local name
    for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        # a name on PATH may be a shim without an interpreter behind it: run it
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3" >&2
    return 1
}

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    if ! "$python" -m venv "$venv"; then
        echo "error: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
fi
# What is installed is compiled to bytecode when it is first imported: most of torch and transformers never is.
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install -qq --no-compile)
# The operators are compiled meanwhile; what goes wrong there is said at first use, which would compile them.
"$venv/bin/python" src/draftproof/runtime/compiling.py >/dev/null 2>&1 &
cuda='import sys, torch; sys.exit(torch.version.cuda is None)'

if [ "$flavour" = gpu ]; then
    # a CPU build of the same version would count as installed already
    "$venv/bin/python" -c "$cuda" 2>/dev/null || "${pip[@]}" uninstall -qq -y torch 2>/dev/null || true
    "${install[@]}" "torch==$torch"
elif ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # PyPI's Linux build of torch carries CUDA (gigabytes), so ask the CPU index first, without waiting for it.
    # --no-deps: that index may not hold the right versions of torch's own requirements; the next step brings them.
    echo "installing torch $torch (CPU build), which takes a minute or two"
    "${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 10 \
        "torch==$torch" 2>/dev/null ||
        { echo "the CPU index is out of reach: taking torch $torch from PyPI" && "${install[@]}" "torch==$torch"; }
fi
echo "installing draftproof${extras:+ [$extras]} and what it needs"
"${install[@]}" --editable ".${extras:+[$extras]}"
# The library that trains heads, for its tests: 3 MB without its own requirements (313 MB), of which `train/library.py`
# needs nothing that the tools for development do not bring.
if [[ ",$extras," == *,dev,* ]]; then
    "${install[@]}" --no-deps 'speculators>=0.9,<0.10' 'hs-connectors>=0.9,<0.10' 'loguru>=0.7.2' ||
        echo "speculators is out of reach: tests of training are skipped"
fi
wait
