# Sourced by the other scripts: leaves an environment in .venv with smpar installed, its sources live.
#
# The stamp holds what the installation depends on, so that a second start takes no time.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
root=$PWD
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

smpar_stamp() {
    {
        "${PYTHON:-python3}" --version
        find setup.py pyproject.toml CMakeLists.txt scripts/setup.sh smpar/csrc -type f | LC_ALL=C sort | xargs sha256sum
    } | sha256sum | cut -d' ' -f1
}

# Where no GPU is, the CPU build of torch saves gigabytes; its index may be out of reach.
smpar_install_torch() {
    if nvidia-smi -L >/dev/null 2>&1; then
        pip install --quiet torch
    else
        pip install --quiet --timeout 5 --retries 0 --index-url https://download.pytorch.org/whl/cpu torch \
            2>/dev/null || pip install --quiet "torch==2.13.0"
    fi
}

smpar_setup() {
    local stamp want
    stamp=.venv/smpar-stamp
    want=$(smpar_stamp) || return 1
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv || return 1
    # shellcheck disable=SC1091
    . .venv/bin/activate || return 1
    [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && compgen -G "smpar/_native*.so" >/dev/null && return 0
    echo "setting up $root/.venv (once; minutes)" >&2
    rm -f "$stamp"
    python -c "import torch" 2>/dev/null || smpar_install_torch || return 1
    pip install --quiet --editable ".[test,lint]" || return 1
    echo "$want" >"$stamp"
}

smpar_setup </dev/null || {
    echo "set-up failed: see the lines above; remove .venv to start afresh" >&2
    exit 1
}
