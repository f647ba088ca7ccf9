#!/usr/bin/env bash
# What src/cuda/driver.h declares of the CUDA driver is what the driver's own headers declare, the oldest and the newest
# of those that scripts/device-compiler downloads: driver_names.sh SOURCE_DIR CC INCLUDE_DIR...
set -euo pipefail
source=$1
cc=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

sed -n 's/^ *\(CU\(DA\)\?_[A-Z0-9_]*\) = .*/CONSTANT(\1)/p' "$source/src/cuda/driver.h" >"$work/driver_constants.h"
[ "$(wc -l <"$work/driver_constants.h")" -ge 20 ]

compiles() {
    local headers=$1
    shift
    "$cc" -x c++ -std=c++17 -fsyntax-only -I "$work" -I "$source/src" -I "$source/include" -isystem "$headers" "$@" \
        "$source/tests/install/driver_names.cpp"
}

[ $# -gt 0 ]
for headers in "$@"; do
    compiles "$headers"
    for control in 1 2; do
        if compiles "$headers" -DCONTROL=$control 2>"$work/said"; then
            echo "a wrong declaration ($control) compiles with $headers"
            exit 1
        fi
        grep -q "an argument" "$work/said"
    done
done
