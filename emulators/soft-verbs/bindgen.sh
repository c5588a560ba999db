#!/bin/sh
# Regenerates src/bindings.rs from rdma-core's public headers with scripts/bindgen.sh: emulators/soft-verbs/bindgen.sh INCLUDE_DIRECTORY
# The checked-in file was made from the headers of 2026-08, after v64.0.
set -eu
include=$1
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The headers' wrapper macros hide two names.
printf '#include <infiniband/verbs.h>\n#include <infiniband/efadv.h>\n' >"$work/wrapper.h"
enums=$(sed -n 's/^enum \([a-z_0-9]*\).*/\1/p' "$include"/infiniband/*.h | sort -u | paste -sd '|')
"$here/../../scripts/bindgen.sh" "$work/wrapper.h" '_?(ibv|efadv|IBV|EFADV)_[A-Za-z_0-9]*|_compat_ibv_port_attr|verbs_context' \
    --allowlist-type "^($enums)\$" --default-enum-style consts \
    --blocklist-type '^(__)?pthread_.*$' --raw-line 'use libc::{pthread_cond_t, pthread_mutex_t};' \
    -- -I"$include" >"$work/raw.rs"
cp "$work/raw.rs" "$here/src/bindings.rs"
rustfmt --edition 2024 --config-path "$here/../.." "$here/src/bindings.rs"
