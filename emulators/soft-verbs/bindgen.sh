#!/bin/sh
# Regenerates src/bindings.rs from rdma-core's public headers: emulators/soft-verbs/bindgen.sh INCLUDE_DIRECTORY
# Needs bindgen 0.72 (cargo install bindgen-cli) and libclang. The checked-in file was made from the headers of 2026-08, after v64.0.
set -eu
include=$1
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The headers' wrapper macros hide two names.
printf '#include <infiniband/verbs.h>\n#include <infiniband/efadv.h>\n' >"$work/wrapper.h"
bindgen "$work/wrapper.h" --rust-edition 2024 --rust-target 1.85 --wrap-unsafe-ops --use-core \
    --no-doc-comments --no-layout-tests --no-prepend-enum-name --default-enum-style consts \
    --with-derive-default --no-derive-debug \
    --allowlist-type '^(_?(ibv|efadv)_.*|_compat_ibv_port_attr|verbs_context)$' --allowlist-var '^_?(IBV|EFADV)_.*$' \
    --blocklist-function '.*' --blocklist-type '^(__)?pthread_.*$' \
    --raw-line 'use libc::{pthread_cond_t, pthread_mutex_t};' \
    -- -I"$include" >"$work/raw.rs"
cp "$work/raw.rs" "$here/src/bindings.rs"
rustfmt --edition 2024 --config-path "$here/.." "$here/src/bindings.rs"
