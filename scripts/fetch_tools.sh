#!/usr/bin/env bash
# Fetches the distribution's programs that tests start, into .tools/: downloaded and unpacked, never installed. No root.
#
# apt keeps its lists and cache in a folder of ours, so neither a prior `apt-get update` nor a right to change the
# system's state is needed; which sources apt asks is the machine's own configuration. A program that the distribution
# does not have (or only as a stub that installs something else) is taken from PATH; what cannot be had is named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=$PWD/.tools
stamp=$tools/.stamp

# program, its package, the file in the package
programs=(
    "prometheus   prometheus               usr/bin/prometheus"
    "promtool     prometheus               usr/bin/promtool"
    "alertmanager prometheus-alertmanager  usr/bin/prometheus-alertmanager"
    "amtool       prometheus-alertmanager  usr/bin/amtool"
    "strace       strace                   usr/bin/strace"
)

say() { printf 'tools: %s\n' "$*" >&2; }

exec 9<scripts/fetch_tools.sh
if command -v flock >/dev/null; then flock 9; fi

fingerprint() { cat scripts/fetch_tools.sh /etc/os-release 2>/dev/null | sha256sum | cut -d ' ' -f 1; }

complete() {
    local line program
    for line in "${programs[@]}"; do
        read -r program _ <<<"$line"
        [[ -x $tools/bin/$program ]] || return 1
    done
}
if [[ -r $stamp && $(<"$stamp") == "$(fingerprint)" ]] && complete; then exit 0; fi

rm -rf "$tools/root" "$tools/bin" "$stamp"
mkdir -p "$tools/apt/state/lists/partial" "$tools/apt/cache/archives/partial" "$tools/apt/debs" "$tools/root" "$tools/bin"

# The system's dpkg status is read, never written. As root, apt would drop to a user that may not write here.
apt=(apt-get -qq -o "Dir::State=$tools/apt/state" -o "Dir::State::status=/var/lib/dpkg/status"
    -o "Dir::Cache=$tools/apt/cache" -o "Dir::Log=$tools/apt" -o "APT::Sandbox::User=$(id -un)"
    -o Acquire::Retries=3 -o Acquire::http::Timeout=60 -o Acquire::https::Timeout=60)

fetchable=yes
for program in apt-get dpkg-deb; do
    if ! command -v "$program" >/dev/null; then
        say "$program is missing: this is not Debian or Ubuntu, so only programs on PATH can be used"
        fetchable=no
    fi
done
if [[ $fetchable == yes ]]; then
    say "reading the package lists into .tools/apt"
    if ! "${apt[@]}" update >"$tools/apt/update.log" 2>&1; then
        say "apt-get update failed:"
        tail -n 5 "$tools/apt/update.log" >&2
    fi
fi

fetched=" "
fetch() { # package -> status 0 when unpacked
    local package=$1 log=$tools/apt/$1.log
    if [[ $fetched == *" $package "* ]]; then return 0; fi
    [[ $fetchable == yes ]] || return 1
    rm -f "$tools/apt/debs/${package}"_*.deb
    (cd "$tools/apt/debs" && "${apt[@]}" download "$package") >"$log" 2>&1 || return 1
    dpkg-deb -x "$tools/apt/debs/${package}"_*.deb "$tools/root" >>"$log" 2>&1 || return 1
    fetched+="$package "
    say "unpacked $(cd "$tools/apt/debs" && echo "${package}"_*.deb)"
}

# A program's libraries that this machine lacks are unpacked beside it; who starts it points LD_LIBRARY_PATH there.
fetch_libraries() { # package, file
    local name
    ldd "$2" 2>/dev/null | grep -q 'not found' || return 0
    for name in $(dpkg-deb -f "$tools/apt/debs/${1}"_*.deb Depends | tr ',' '\n' | sed 's/[|(].*//; s/:.*//'); do
        [[ $name == libc6 ]] || fetch "$name" || say "library $name of $1 could not be had"
    done
}

# A stub is a package whose program is not in it, or is a script that only points at another package manager.
real() { [[ -x $1 ]] && ! { head -c 2 "$1" | grep -q '#!' && grep -qw snap "$1"; } 2>/dev/null; }

missing=()
for line in "${programs[@]}"; do
    read -r program package file <<<"$line"
    if fetch "$package" && real "$tools/root/$file"; then
        fetch_libraries "$package" "$tools/root/$file"
        ln -sfn "../root/$file" "$tools/bin/$program"
    elif found=$(command -v "${file##*/}" || command -v "$program") && real "$found"; then
        say "$program: the one on PATH ($found)"
        ln -sfn "$found" "$tools/bin/$program"
    else
        reason=$(tail -n 1 "$tools/apt/$package.log" 2>/dev/null || true)
        missing+=("$program could not be had from package $package${reason:+ ($reason)}; install it with: apt-get install $package")
    fi
done
rm -rf "$tools/apt/debs"
if ((${#missing[@]})); then
    for line in "${missing[@]}"; do say "$line"; done
    say "make test-core runs the tests that need none of this"
    exit 1
fi
fingerprint >"$stamp"
