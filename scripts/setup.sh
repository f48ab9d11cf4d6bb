#!/usr/bin/env bash
# Creates .venv/ at the root of the checkout, with `quiesce` (editable) and everything that its tests need. No root.
#
# Variables (README.md has the table):
#   PYTHON       the interpreter to use (python3)
#   TORCH        auto | cpu | cuda | existing; unset means: as at the last set-up, at first auto
#   TORCH_INDEX  an extra package index for torch
#   DEV          no: leave out the tools of tests and chores, and their pins (a machine that only runs)
#
# A second call with nothing changed only compares a fingerprint, so every make target may call it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.setup-stamp
python=${PYTHON:-python3}
dev=${DEV:-yes}

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

say() { printf 'setup: %s\n' "$*" >&2; }

# One set-up at a time, also under `make -j`; the lock is on a file that is always here.
exec 9<pyproject.toml
if command -v flock >/dev/null; then flock 9; fi

# ---- what the machine must have -------------------------------------------------------------------------------------
missing=()
for program in make git; do
    command -v "$program" >/dev/null || missing+=("$program is missing; install it with: apt-get install $program")
done
if ! command -v "$python" >/dev/null; then
    missing+=("$python is missing (Python 3.11 to 3.13); install it with: apt-get install python3 python3-venv")
elif ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    missing+=("$("$python" --version 2>&1) at $(command -v "$python") is not 3.11, 3.12 or 3.13; Debian 12 and Ubuntu 24.04 have one: apt-get install python3 python3-venv, or name another with PYTHON=")
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=("the venv module of $python is missing; install it with: apt-get install python3-venv")
fi
if ((${#missing[@]})); then die "${missing[@]}"; fi

# ---- which torch ----------------------------------------------------------------------------------------------------
torch=${TORCH:-}
if [[ -z $torch && -r $stamp ]]; then torch=$(sed -n 's/^torch=//p' "$stamp"); fi
torch=${torch:-auto}

# Prints version and folder of the torch that $python imports by itself; nothing when there is none.
present_torch() {
    "$python" - 2>/dev/null <<'PY' || true
import pathlib
import torch

print(torch.__version__, pathlib.Path(torch.__file__).parent.parent)
PY
}

new_enough() {
    "$python" -c 'import re, sys; sys.exit(tuple(map(int, re.findall(r"\d+", sys.argv[1])[:2])) < (2, 11))' "$1"
}

has_gpu() { [[ -e /dev/nvidiactl ]] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; }

fingerprint() {
    # The checkout's path counts because an editable install points at it; the interpreter because a venv belongs to one.
    {
        cat pyproject.toml constraints.txt constraints-cpu.txt scripts/setup.sh
        printf '%s\n' "$PWD" "$1" "${TORCH_INDEX:-}" "$dev" "$(readlink -f "$(command -v "$python")")"
    } | sha256sum | cut -d ' ' -f 1
}

current() {
    [[ -r $stamp && -x $venv/bin/python ]] && [[ $(sed -n 's/^fingerprint=//p' "$stamp") == "$(fingerprint "$torch")" ]]
}

if current; then exit 0; fi

kind=$torch
existing_version='' existing_folder=''
case $torch in
    auto | existing)
        read -r existing_version existing_folder < <(present_torch) || true
        if [[ -n $existing_version ]] && new_enough "$existing_version"; then
            kind=existing
        elif [[ $torch == existing ]]; then
            found="no torch"
            if [[ -n $existing_version ]]; then found="torch $existing_version"; fi
            die "TORCH=existing, but $python imports $found; 2.11 or later is needed" \
                "install it for that interpreter, name another interpreter with PYTHON=, or use TORCH=cpu or TORCH=cuda"
        else
            if [[ -n $existing_version ]]; then say "torch $existing_version of $python is older than 2.11 and left alone"; fi
            if has_gpu; then kind=cuda; else kind=cpu; fi
        fi
        ;;
    cpu | cuda) ;;
    *) die "TORCH=$torch is not one of auto, cpu, cuda, existing" ;;
esac
say "TORCH=$torch: $kind ${existing_version:+(torch $existing_version)}"

# ---- the virtual environment ----------------------------------------------------------------------------------------
site=()
wanted_site=false
if [[ $kind == existing ]]; then site=(--system-site-packages) wanted_site=true; fi

usable() {
    [[ -x $venv/bin/python && -r $venv/pyvenv.cfg ]] &&
        grep -q "^include-system-site-packages = $wanted_site$" "$venv/pyvenv.cfg" &&
        [[ $("$venv/bin/python" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null) == \
            $("$python" -c 'import sys; print(sys.base_prefix, sys.version)') ]]
}
rm -f "$stamp"
if ! usable; then "$python" -m venv --clear "${site[@]}" "$venv"; fi

constraints=()
case $kind in
    cpu) constraints+=(-c constraints-cpu.txt) ;;
    existing)
        # An interpreter that is itself in a virtual environment: its packages are not the system's, so point at them.
        if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
            echo "$existing_folder" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/existing-torch.pth"
        fi
        echo "torch==$existing_version" >"$venv/constraints-existing.txt"
        constraints+=(-c "$venv/constraints-existing.txt")
        ;;
esac

pip=("$venv/bin/python" -m pip --disable-pip-version-check)
extras=grpo,dashboards,otlp,report,view
what=()
if [[ $dev != no ]]; then
    extras+=,otlp-grpc,wandb
    constraints+=(-c constraints.txt)
    what+=(--group dev)
    # Dependency groups came with pip 25.1; Debian 12 and Ubuntu 24.04 put an older one into a new environment.
    "${pip[@]}" install --quiet --quiet 'pip>=25.1'
fi
what+=(-e ".[$extras]")
index=()
if [[ -n ${TORCH_INDEX:-} ]]; then index=(--extra-index-url "$TORCH_INDEX"); fi
say "installing into $venv (minutes the first time)"
"${pip[@]}" install --quiet --quiet "${index[@]}" "${constraints[@]}" "${what[@]}"

"$venv/bin/python" -c 'import torch; print("setup: torch", torch.__version__, "CUDA" if torch.cuda.is_available() else "CPU")' >&2
printf 'torch=%s\nfingerprint=%s\n' "$torch" "$(fingerprint "$torch")" >"$stamp"
