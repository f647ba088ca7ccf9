#!/usr/bin/env bash
# Installs a build into an empty folder, and builds a small C and C++ program against it with nothing but pkg-config,
# then with nothing but find_package: consume.sh BUILD_DIR CMAKE CC
set -euo pipefail
build=$1
cmake=$2
cc=$3
here=$(cd "$(dirname "$0")" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DESTDIR="$work/stage"
"$cmake" --install "$build" >"$work/install.log" || { cat "$work/install.log"; exit 1; }
unset DESTDIR

prefix=$(sed -n 's/^CMAKE_INSTALL_PREFIX:[^=]*=//p' "$build/CMakeCache.txt")
root=$work/stage$prefix
pc=$(find "$root" -name kvferry.pc)
libdir=$(dirname "$(dirname "$pc")")
(cd "$root/include" && find kvferry -name '*.h' | LC_ALL=C sort | sed 's/.*/#include <&>/') >"$work/every_header.h"
version=$(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config --modversion kvferry)

# build_with NAME LIBRARY_FLAGS...: compiles, links and runs the program.
build_with() {
    local name=$1 flags
    shift
    read -ra flags < <(pkg-config --cflags kvferry)
    "$cc" -x c -std=c11 -Wall -Wextra -Werror "${flags[@]}" -I "$work" -c "$here/consumer.c" -o "$work/c.o"
    "$cc" -x c++ -std=c++17 -Wall -Wextra -Werror "${flags[@]}" -I "$work" -c "$here/consumer_cxx.cpp" \
        -o "$work/cxx.o"
    "$cc" "$work/c.o" "$work/cxx.o" "$@" -lstdc++ -o "$work/$name"
    LD_LIBRARY_PATH=$libdir "$work/$name" "$version"
    echo "ok: $name"
}

export PKG_CONFIG_PATH=$libdir/pkgconfig
read -ra shared < <(pkg-config --libs kvferry)
build_with pkgconfig_shared "${shared[@]}"
read -ra static < <(pkg-config --static --libs kvferry | sed 's/-lkvferry/-l:libkvferry.a/')
build_with pkgconfig_static "${static[@]}"

# What `kvferry help` and its manual page point to.
schema=$root/share/doc/kvferry/groups.schema.json
[ -s "$schema" ] || { echo "consume: $schema is missing" >&2; exit 1; }
echo "ok: the schema of --groups"

# The lines of the documents, with the README's example.
(
    cp "$here/../../examples/explain.c" "$work/app.c"
    cd "$work"
    lines=0
    while IFS= read -r line; do
        rm -f a.out
        eval "\"\$cc\" ${line#cc } -o a.out"
        LD_LIBRARY_PATH=$libdir ./a.out >said
        grep -q '^rank 0 sends ' said
        lines=$((lines + 1))
    done < <(grep '^cc app.c ' "$here/../../docs/README.md")
    [ "$lines" -eq 2 ]
    # The last one is static.
    ! ldd a.out | grep kvferry
)
echo "ok: lines of the documents"
unset PKG_CONFIG_PATH

"$cmake" -S "$here" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$root" -DCMAKE_C_COMPILER="$cc" \
    -DEVERY_HEADER_DIR="$work" -DWANTED_VERSION="$version" >"$work/cmake.log" 2>&1 &&
    "$cmake" --build "$work/cmake" >>"$work/cmake.log" 2>&1 || { cat "$work/cmake.log"; exit 1; }
for program in consumer_shared consumer_static; do
    "$work/cmake/$program" "$version"
    echo "ok: $program"
done

# The libraries' names; and the command must find its library without help.
[ "$(readlink "$libdir/libkvferry.so")" = "libkvferry.so.${version%.*}" ]
[ "$(readlink "$libdir/libkvferry.so.${version%.*}")" = "libkvferry.so.$version" ]
if [ -x "$root/bin/kvferry" ]; then
    "$root/bin/kvferry" --version
fi
echo "ok: names and command"

# Whoever packages may give absolute folders.
"$cmake" -S "$here/../.." -B "$work/absolute" -DCMAKE_C_COMPILER="$cc" -DKVF_BUILD_TESTS=OFF -DKVF_NVRTC=OFF \
    -DCMAKE_INSTALL_PREFIX=/opt/kvferry -DCMAKE_INSTALL_LIBDIR=/opt/kvferry/lib64 \
    -DCMAKE_INSTALL_INCLUDEDIR=/opt/headers >"$work/absolute.log" 2>&1 || { cat "$work/absolute.log"; exit 1; }
mkdir -p "$work/opt/kvferry/lib64/pkgconfig"
cp "$work/absolute/kvferry.pc" "$work/opt/kvferry/lib64/pkgconfig"
folder_of() { # folder_of VARIABLE: as pkg-config gives it, from the tree in the work folder
    realpath -m "$(PKG_CONFIG_PATH=$work/opt/kvferry/lib64/pkgconfig pkg-config --variable="$1" kvferry)"
}
[ "$(folder_of libdir)" = "$(realpath -m "$work/opt/kvferry/lib64")" ]
[ "$(folder_of includedir)" = "$(realpath -m "$work/opt/headers")" ]
echo "ok: absolute folders"

# Uninstalling removes the installed files, and leaves other files in place.
touch "$root/include/others.h"
DESTDIR=$work/stage "$here/../../scripts/uninstall" "$build" >"$work/uninstall.log"
left=$(find "$work/stage" \( -type f -o -type l -o -name 'kvferry*' \))
if [ "$left" != "$root/include/others.h" ]; then
    echo "left by uninstall: $left"
    exit 1
fi
echo "ok: uninstalled"
