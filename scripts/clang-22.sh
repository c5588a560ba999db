#!/usr/bin/env bash
# Prints the command of clang 22 or newer: clang-22.sh clang|clang++. Older LLVMs can't compile acquiring loads for a GPU. Exits with 3 and
# the reason if there is none.
for command in "$1-22" "$1"; do
    version=$("$command" -dumpversion 2>/dev/null | cut -d. -f1)
    if [ "${version:-0}" -ge 22 ]; then
        echo "$command"
        exit
    fi
done
echo "no clang 22 is here (apt-get install clang-22)" >&2
exit 3
