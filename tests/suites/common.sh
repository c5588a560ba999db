#!/bin/bash
# Sourced by the scripts next to it: where they build, and what both build with. Expects `root` and `dist`.
# shellcheck disable=SC2154
built=$root/.cache/suites
mkdir -p "$built"

# once NAME...: runs each function that builds $built/NAME, unless it has succeeded before. The output goes to
# $built/NAME.log.
once() {
    local name
    for name; do
        [ ! -f "$built/$name.done" ] || continue
        rm -rf "${built:?}/$name"
        # In the background, because bash ignores `set -e` in a condition.
        (set -e; "$name") >"$built/$name.log" 2>&1 &
        wait $! || {
            tail -n 30 "$built/$name.log"
            echo "building $name failed: $built/$name.log"
            exit 1
        }
        touch "$built/$name.done"
    done
}

# Headers of the newest rdma-core, which configuring it puts in one place, and the card's libraries to link with:
# $built/verbs.
verbs() {
    git clone --depth 1 "${RDMA_CORE:-https://github.com/linux-rdma/rdma-core}" "$built/verbs/source"
    cmake -S "$built/verbs/source" -B "$built/verbs" -DNO_MAN_PAGES=1 -DNO_PYVERBS=1 -DENABLE_RESOLVE_NEIGH=0
    rm -rf "$built/verbs/lib"
    ln -s "$dist/verbs" "$built/verbs/lib"
}

card() {
    "$dist/ferrogin" verbs -- "$@"
}
