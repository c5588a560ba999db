#!/usr/bin/env bash
# Runs libfabric's own tests of its provider efa, unmodified, on software cards: libfabric.sh [DIST]
#
# Builds libfabric and fabtests in .cache/suites first, unless that's done; this takes git, autoconf, automake, libtool,
# cmake, cmocka, googletest with gmock, a C++ compiler, and pytest from PyPI. Runs the provider's unit tests in C and
# C++ and the pytest suite of fabtests, and prints their own reports; exits with status 1 if a test failed.
#
#   LIBFABRIC=URL RDMA_CORE=URL   where to clone from, also a local directory [GitHub; rdma-core for its headers]
#   FABTESTS='rma or rnr'         the cases of fabtests whose names match, as pytest -k takes it [all]
#   TESTSETS=all                  fabtests' sets of tests; `all` repeats every transfer more often and takes hours [quick]
#   TWO_HOSTS=1                   fabtests' sides in two network namespaces, which reach each other only over TCP [on one host]
#   LIMIT=N                       seconds for each case of fabtests [300]
#   SOFTEFA_FAULTS=LIST           faults of the cards [none]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
dist=$(cd "${1:-$root/dist}" && pwd)
. "$root/tests/suites/common.sh"

libfabric() {
    git clone --depth 1 "${LIBFABRIC:-https://github.com/ofiwg/libfabric}" "$built/libfabric"
    cd "$built/libfabric"
    ./autogen.sh
}

# library DIR OPTION...: with unit tests, stubs take the place of the functions that post and poll, so these are several
# builds.
library() {
    mkdir "$built/$1"
    cd "$built/$1"
    "$built/libfabric/configure" --prefix="$built/$1/installed" --enable-only --enable-shm --enable-efa="$built/verbs" \
        CPPFLAGS="-I$built/verbs/include" "${@:2}"
    make -j"$(nproc)"
}

installed() {
    library installed
    make install
}

unit() {
    # Its configure script fails with a cmocka that is in the compiler's own directories.
    mkdir -p "$built/cmocka"
    ln -sfn /usr/include "$built/cmocka/include"
    ln -sfn "$(dirname "$(cc -print-file-name=libcmocka.so)")" "$built/cmocka/lib"
    library unit --enable-efa-unit-test="$built/cmocka"
    make -j"$(nproc)" prov/efa/test/efa_unit_test
}

unit_cxx() {
    # Without the other headers of /usr/include, which would come before rdma-core's.
    mkdir -p "$built/googletest/include"
    ln -sfn /usr/include/gtest /usr/include/gmock "$built/googletest/include/"
    ln -sfn "$(dirname "$(cc -print-file-name=libgtest.a)")" "$built/googletest/lib"
    library unit_cxx --enable-efa-gtest="$built/googletest"
    make -j"$(nproc)" prov/efa/test/gtest/efa_gtest
}

fabtests() {
    mkdir "$built/fabtests"
    (cd "$built/libfabric/fabtests" && ./autogen.sh)
    cd "$built/fabtests"
    "$built/libfabric/fabtests/configure" --prefix="$built/fabtests/installed" --with-libfabric="$built/installed/installed" CPPFLAGS="-I$built/verbs/include" \
        LDFLAGS="-L$built/verbs/lib"
    make -j"$(nproc)" install
    python3 -m venv python
    python/bin/pip install --quiet -r "$built/libfabric/fabtests/pytest/requirements.txt"
}

once verbs libfabric installed unit unit_cxx fabtests
server=127.0.0.1 client=127.0.0.1 peer=
if [ "${TWO_HOSTS:-}" = 1 ]; then
    exec env TWO_HOSTS=inside unshare --user --map-root-user --net "${BASH_SOURCE[0]}" "$dist"
elif [ "${TWO_HOSTS:-}" = inside ]; then
    . "$root/tests/second-host.sh"
    server=192.0.2.2 client=192.0.2.1
    export SOFTEFA_IFADDR=$client
fi
work=$(mktemp -d)
trap 'rm -rf "$work"; kill $peer 2>/dev/null' EXIT
status=0

# A table that one of the tests reads has 16-bit request ids (qp_caps=0).
for program in unit/prov/efa/test/efa_unit_test unit_cxx/prov/efa/test/gtest/efa_gtest; do
    SOFTEFA_FAULTS=qp_caps=0 card "$built/$program" >"$work/log" 2>&1 || status=1
    echo "$(basename "$program"):"
    # The C program reports in XML.
    grep -E '^\[ *(PASSED|SKIPPED|FAILED) |<testsuite |<failure' "$work/log" || tail "$work/log"
done

# fabtests starts both sides over ssh.
cat >"$work/ssh" <<END
#!/bin/bash
until [ "\$1" = $server ] || [ "\$1" = $client ]; do shift; done
host=\$1
shift
[ \$host != 192.0.2.2 ] || exec nsenter --target $peer --net env SOFTEFA_IFADDR=\$host bash -c "\$*"
exec bash -c "\$*"
END
chmod +x "$work/ssh"
tests=$built/fabtests/installed/bin
export PATH=$work:$built/installed/installed/bin:$tests:$PATH LD_LIBRARY_PATH=$built/installed/installed/lib FI_EFA_ENABLE_SHM_TRANSFER=0
card "$built/fabtests/python/bin/python" "$tests/runfabtests.py" -b -T "${LIMIT:-300}" --nworkers 1 -t "${TESTSETS:-quick}" -p "$tests" \
    ${FABTESTS:+--expression "$FABTESTS"} efa "$server" "$client" || status=1
exit $status
