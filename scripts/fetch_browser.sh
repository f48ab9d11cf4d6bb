#!/usr/bin/env bash
# Fetches a browser into .tools/browser/, for the tests that look at pages: downloaded and unpacked, never installed. No root.
#
# A Chromium that this machine has is used as it is. Otherwise the distribution's package is fetched with everything
# that it needs and that the machine lacks; .tools/browser/chromium starts it with these libraries.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools=$PWD/.tools
browser=$tools/browser
packages=(chromium-headless-shell chromium) # the first one that the distribution has; the shell is the smaller one

say() { printf 'browser: %s\n' "$*" >&2; }

mkdir -p "$browser"
exec 9<scripts/fetch_browser.sh
if command -v flock >/dev/null; then flock 9; fi

works() { [[ -x $1 ]] && timeout 60 "$1" --headless --no-sandbox --disable-gpu --dump-dom about:blank 2>/dev/null | grep -q '<html'; }

if works "$browser/chromium"; then exit 0; fi
for name in chromium chromium-browser google-chrome chromium-headless-shell; do
    found=$(command -v "$name" || true)
    if [[ -n $found ]] && ! { head -c 2 "$found" | grep -q '#!' && grep -qw snap "$found"; } 2>/dev/null && works "$found"; then
        say "the one on PATH ($found)"
        ln -sfn "$found" "$browser/chromium"
        exit 0
    fi
done
for program in apt-get dpkg-deb; do
    if ! command -v "$program" >/dev/null; then
        say "there is no Chromium on PATH, and without $program none can be fetched"
        exit 1
    fi
done

rm -rf "$browser"
mkdir -p "$browser/state/lists/partial" "$browser/cache/archives/partial" "$browser/debs" "$browser/root"
# The system's dpkg status is read, never written: what is installed need not be fetched. See fetch_tools.sh.
apt=(apt-get -qq -o "Dir::State=$browser/state" -o "Dir::State::status=${DPKG_STATUS:-/var/lib/dpkg/status}"
    -o "Dir::Cache=$browser/cache" -o "Dir::Log=$browser" -o "APT::Sandbox::User=$(id -un)" -o Debug::NoLocking=1
    -o Acquire::Retries=3 -o Acquire::http::Timeout=60 -o Acquire::https::Timeout=60)
say "reading the package lists into .tools/browser"
if ! "${apt[@]}" update >"$browser/update.log" 2>&1; then
    say "apt-get update failed:"
    tail -n 5 "$browser/update.log" >&2
fi

for package in "${packages[@]}"; do
    # With a font, because a page without one is a page without text. Simulated only: the list is what is wanted.
    if "${apt[@]}" install --simulate --no-install-recommends "$package" fonts-dejavu-core >"$browser/closure.log" 2>&1; then break; fi
    package=
done
if [[ -z $package ]]; then
    say "the distribution has none of ${packages[*]}:"
    tail -n 3 "$browser/closure.log" >&2
    exit 1
fi
mapfile -t closure < <(awk '$1 == "Inst" { print $2 }' "$browser/closure.log")
say "fetching $package: ${#closure[@]} packages"
(cd "$browser/debs" && "${apt[@]}" download "${closure[@]}") >"$browser/download.log" 2>&1 || {
    say "they could not be fetched:"
    tail -n 3 "$browser/download.log" >&2
    exit 1
}
for deb in "$browser"/debs/*.deb; do dpkg-deb -x "$deb" "$browser/root"; done
rm -rf "$browser/debs" "$browser/cache" "$browser/state"

program=
for file in usr/lib/chromium/headless_shell usr/lib/chromium/chromium-headless-shell usr/bin/chromium-headless-shell usr/lib/chromium/chromium; do
    if [[ -x $browser/root/$file ]] && ! head -c 2 "$browser/root/$file" | grep -q '#!'; then
        program=$file
        break
    fi
done
if [[ -z $program ]]; then
    say "the package has no program where it is looked for"
    exit 1
fi
triplet=$(cd "$browser/root/usr/lib" && echo *-linux-gnu*)
cat >"$browser/chromium" <<SCRIPT
#!/usr/bin/env bash
root=\$(cd "\$(dirname "\${BASH_SOURCE[0]}")" && pwd)/root
export LD_LIBRARY_PATH="\$root/usr/lib/$triplet:\$root/lib/$triplet:\$root/usr/lib/chromium\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export XDG_DATA_DIRS="\$root/usr/share:\${XDG_DATA_DIRS:-/usr/local/share:/usr/share}"
export FONTCONFIG_FILE="\$root/fonts.conf"
exec "\$root/$program" "\$@"
SCRIPT
chmod +x "$browser/chromium"
cat >"$browser/root/fonts.conf" <<CONF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>$browser/root/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$browser/root/fontcache</cachedir></fontconfig>
CONF
works "$browser/chromium" || { say "what was fetched does not start"; "$browser/chromium" --version >&2 || true; exit 1; }
say "unpacked $package"
