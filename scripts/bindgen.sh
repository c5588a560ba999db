#!/usr/bin/env bash
# Prints Rust declarations of what this repository uses of a C interface: bindgen.sh HEADER NAMES OPTION...
#
# NAMES is a pattern of the interface's names; declared are those that a source in this repository has, and what they
# need. The options are bindgen's. Needs bindgen 0.73 (cargo install bindgen-cli) and libclang. Serves libfabric/bindgen.sh and
# emulators/soft-verbs/bindgen.sh.
set -euo pipefail
header=$1
names=$(git -C "$(dirname "$0")/.." grep -ohwE "$2" -- '*.rs' ':!*/bindings.rs' | sort -u | paste -sd '|')
shift 2

# Structs with pointers have no derived default: bindgen writes a function each, which becomes a line here. An enum's
# constants come together.
bindgen "$header" --rust-edition 2024 --rust-target 1.85 --wrap-unsafe-ops --use-core \
    --no-doc-comments --no-layout-tests --no-prepend-enum-name --with-derive-default --no-derive-debug \
    --allowlist-type "^($names)\$" --allowlist-var "^($names)\$" --blocklist-function '.*' "$@" | awk -v names="^($names)\$" '
    NR == 2 {
        print "\nmacro_rules! zeroed {\n    ($name:ident) => {\n        impl Default for $name {\n            fn default() -> Self {"
        print "                unsafe { ::core::mem::zeroed() }\n            }\n        }\n    };\n}"
    }
    /^impl Default for / { print "zeroed!(" $4 ");"; inside = 1 }
    /^pub const / { name = $3; sub(":", "", name); constant = 1; used = name ~ names }
    constant { if (used) print; constant = !/;$/; next }
    !inside { print }
    /^}/ { inside = 0 }'
