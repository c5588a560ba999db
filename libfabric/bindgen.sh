#!/bin/sh
# Regenerates src/bindings.rs from a libfabric source tree with scripts/bindgen.sh: libfabric/bindgen.sh LIBFABRIC_SOURCE
# The checked-in file is from v2.6.0rc1-427-gaf8ddbe92.
set -eu
source=$1
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for header in fabric fi_domain fi_endpoint fi_cm fi_eq fi_rma fi_tagged fi_errno fi_ext fi_atomic providers/fi_prov; do
    echo "#include <rdma/$header.h>"
done >"$work/wrapper.h"
echo '#include "fi_ext_efa.h"' >>"$work/wrapper.h"

# bindgen doesn't evaluate casts, so constants that are casts are written out here.
"$here/../scripts/bindgen.sh" "$work/wrapper.h" 'fid?_[a-z_0-9]*|fid|FI_[A-Z_0-9]*|iovec' --default-enum-style moduleconsts \
    --raw-line 'pub const FI_ADDR_UNSPEC: fi_addr_t = fi_addr_t::MAX;' \
    --raw-line 'pub const FI_ADDR_NOTAVAIL: fi_addr_t = fi_addr_t::MAX;' \
    --raw-line 'pub const FI_KEY_NOTAVAIL: u64 = u64::MAX;' \
    -- -I"$source/include" -I"$source/prov/efa/src" >"$work/raw.rs"

# Types as the interface uses them: 64-bit flags (macros of the form 1ULL << n and their sums), int error codes and
# int mr_mode bits. Unnamed enums' constants move out of their generated modules.
flags=$(sed -n 's/^#define[[:space:]]\+\(FI_[A-Z0-9_]*\)[[:space:]]\+(1ULL[[:space:]]*<<.*/\1/p' "$source"/include/rdma/*.h | sort -u)
for flag in $flags FI_TRANSMIT FI_EVENT FI_ATOMICS; do
    echo "s/^pub const $flag: u32 =/pub const $flag: u64 =/"
done >"$work/types.sed"
cat >>"$work/types.sed" <<'SED'
s/^pub const \(FI_E[A-Z0-9]*\): u32 =/pub const \1: i32 =/
s/^pub const \(FI_SUCCESS\|FI_ERRNO_OFFSET\): u32 =/pub const \1: i32 =/
s/^pub const \(FI_MR_[A-Z_]*\): u32 =/pub const \1: i32 =/
s/: u32 = -/: i32 = -/
SED
awk '
    /^pub mod _bindgen_ty_[0-9]+ \{/ { inside = 1; next }
    inside && /^\}/ { inside = 0; next }
    inside && /pub const FI_/ { sub(/^ +/, ""); sub(/: Type/, ": u32"); print; next }
    inside { next }
    { print }
' "$work/raw.rs" | sed -f "$work/types.sed" >"$here/src/bindings.rs"
rustfmt --edition 2024 --config-path "$here/.." "$here/src/bindings.rs"
