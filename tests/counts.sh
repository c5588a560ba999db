# Sourced by the test runners: directories, and a line per test with the counts of them.
#
# A runner may set `log`, whose last lines follow a failure, and `summary`, a file that gets every counted line too. `here` is the
# runner's own directory.
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
passed=0 failed=0 skipped=0

# say PASS|FAIL|SKIP NAME: prints and counts a line.
say() {
    echo "$1 $2" | tee -a "${summary:-/dev/null}"
    case $1 in
    PASS) passed=$((passed + 1)) ;;
    FAIL) failed=$((failed + 1)) ;;
    SKIP) skipped=$((skipped + 1)) ;;
    esac
}
pass() { say PASS "$1"; }
skip() { say SKIP "$1"; }

# fail NAME [FILE...]: also prints the last lines of the files, or of $log.
fail() {
    say FAIL "$1"
    shift
    [ $# -gt 0 ] || set -- "${log:-/dev/null}"
    tail -n 20 "$@" 2>/dev/null | sed 's/^/    /' || true
}

# verdict NAME STATUS: whether a command passed.
verdict() {
    if [ "$2" -eq 0 ]; then pass "$1"; else fail "$1: status $2"; fi
}

# count FILE STATUS NAME [PREFIX]: prints and counts the lines of another program, which failed if its status says so and no line does.
count() {
    local line before=$failed
    [ "$1" != "${log:-}" ] || local log=
    while IFS= read -r line; do
        case $line in
        "FAIL "*) fail "${4:-}${line#* }" ;;
        "PASS "* | "SKIP "*) say "${line%% *}" "${4:-}${line#* }" ;;
        *": "*" passed, "*" failed, "*" skipped") ;;
        *) echo "$line" ;;
        esac
    done <"$1"
    [ "$2" -eq 0 ] || [ "$failed" -gt "$before" ] || fail "$3: status $2"
}

# environment DIRECTORY NAME PIP-ARGUMENT...: sets `place` to a Python environment with packages of PyPI in .cache/DIRECTORY/NAME, made once.
# Otherwise skips NAME, with the reason that is in $log.
environment() {
    place=$root/.cache/$1/$2
    [ -d "$place" ] && return
    mkdir -p "${place%/*}"
    if python3 -m venv "$place.new.$$" 2>"$log" && timeout 600 "$place.new.$$/bin/pip" install --quiet --no-compile "${@:3}" 2>"$log"; then
        mv -T "$place.new.$$" "$place" 2>/dev/null || rm -rf "$place.new.$$" # another run was first
        return
    fi
    rm -rf "$place.new.$$"
    skip "$2 of PyPI: $(tail -n 1 "$log")"
    return 1
}

# finish [NAME]: prints the counts of the runner, whose name is its directory's, and exits.
finish() {
    echo "${1:-$(basename "$here")}: $passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}
