#!/usr/bin/env bash
# Runs nccl_ep's and DeepEP's own kernels on the software GPU and the software card: run.sh [DIST]
#
# Fetches their packages from PyPI once (into .cache/), makes the edits that patch.py lists, compiles examples/ep/ll.cu, ht.cu and deepep.cu with
# their kernels (into target/ep/), and runs dispatch and combine between ranks, each a process. The programs check every row, weight and
# count. Then runs kernels and set-ups with a known defect, which must be noticed. Prints a line per test and a final line with the counts; exits
# with status 1 if a test failed. What isn't available counts as skipped.
#
#   FERROGIN_SOAK=1   all types, layouts and sizes, and all seeds of each defect
#   EP_ONLY=TEXT      only the tests whose names contain TEXT
#   EP_OUT=DIR        compiles into DIR, so that two runs don't use the same files
set -uo pipefail

. "$(dirname "$0")/../counts.sh"
dist=$(cd "${1:-$root/dist}" && pwd) || exit 1
out=${EP_OUT:-$root/target/ep}
faults=reorder=64,reread=0.2,delay_us=0..200
limit=300 # seconds for a job, which takes seconds on an idle machine
unset SOFTEFA_FAULTS SOFTEFA_NICS SOFTEFA_WIRE
export FERROGIN_PROVIDER=softefa FERROGIN_DEVICE=cuda NCCL_GIN_PLUGIN=$dist/libnccl-rma-ferrogin.so DIST=$dist
mkdir -p "$out"
log=$(mktemp "$out/log.XXXXXX")
trap 'rm -f "$log"' EXIT

skip_all() {
    skip "expert-parallel kernels: $1"
    finish
}

# build KIND EDITS DEFINE...: compiles a driver and kernels that have these edits, as far as this run hasn't yet. Sets `program` and `kernels`.
declare -A programs=() built=()
build() {
    local kind=$1 edits=$2 headers host status=0 from=$nccl_ep
    shift 2
    # The edits, and which backend the kernels use on the same handles, don't concern the host.
    host="$kind $(printf '%s\n' "$@" | grep -vx -e -DNCCL_OWN_BACKEND | sort | tr '\n' ' ')"
    kernels=$out/$(tr -c 'A-Za-z0-9\n' '-' <<<"$kind $edits $*")
    program=${programs[$host]:-$kernels}
    [ -z "${built[$kernels]:-}" ] || return 0
    if [ "$kind" = deepep ]; then
        from=$deep_ep
        set -- -std=gnu++20 "$@"
    fi
    headers=$out/headers-$(basename "$(dirname "$from")")-$(tr -c 'a-z0-9\n' '-' <<<"$edits")
    # shellcheck disable=SC2086
    [ -n "${built[$headers]:-}" ] || python3 "$here/patch.py" "$from" "$headers" $edits >"$log" 2>&1 || return
    KERNELS_ONLY=${programs[$host]:-} "$here/compile.sh" "$root/examples/ep/$kind.cu" "$kernels" "$headers" "$@" >"$log" 2>&1 || status=$?
    [ $status -ne 3 ] || skip_all "$(tail -n 1 "$log")"
    [ $status -eq 0 ] && programs[$host]=$program built[$kernels]=1 built[$headers]=1
}

# job RANKS SETTING... -- OPTION...: starts the ranks of `program`, PER_NODE on each node (default: 1). Succeeds if all of them, but the one that
# dies=RANK names, found every value right.
job() {
    local ranks=$1 left=$1 settings=()
    shift
    while [ "$1" != -- ]; do
        settings+=("$1")
        shift
    done
    shift
    [[ " $*" != *" dies="* ]] || left=$((ranks - 1))
    env FERROGIN_SIGNALS=emulated "${settings[@]}" timeout --kill-after=5 "$limit" "$dist/ferrogin" gpu -- "$dist/ferrogin" run -n "$ranks" -- \
        bash -c 'export FERROGIN_NODE=$((FERROGIN_RANK / ${PER_NODE:-1})); [[ " $* " != *" dies=$FERROGIN_RANK "* ]] || { "$0" "$@"; exit 0; }; exec "$0" "$@"' \
        "$program" kernels="$kernels.ptx" device="$dist/cuda/ferrogin_device.ptx" "$@" >"$log" 2>&1 &&
        [ "$(grep -c ', 0 values are wrong$' "$log")" -eq "$left" ]
}

wanted() {
    [[ $1 == *"${EP_ONLY:-}"* ]]
}

# right NAME KIND RANKS "DEFINE..." "SETTING..." OPTION...: every value must be right. EDITS has more arguments for patch.py.
right() {
    local name=$1 kind=$2 ranks=$3 defines=$4 settings=$5
    shift 5
    wanted "$name" || return 0
    [ "$kind" = ll ] || defines+=" -DRANKS=$ranks"
    if [ "$kind" = ht ] && [[ $settings =~ PER_NODE=([0-9]+) ]]; then defines+=" -DPER_NODE=${BASH_REMATCH[1]}"; fi
    # shellcheck disable=SC2086
    if build "$kind" "${EDITS:-}" $defines && job "$ranks" $settings -- "$@"; then pass "$name"; else fail "$name"; fi
}

# noticed NAME SEEDS KIND "EDIT..." "SETTING..." OPTION... [-- DEFINE...]: two ranks must find wrong values, or the software GPU a mistake, with one of the
# first seeds. A soak tries all of them and says how many do.
noticed() {
    local name=$1 seeds=$2 kind=$3 edits=$4 settings=$5 seed notices=0 options=() defines=()
    shift 5
    wanted "$name" || return 0
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    [ "$kind" = ll ] || defines=(-DRANKS=2)
    if ! build "$kind" "$edits" "${@:2}" "${defines[@]}"; then
        fail "$name"
        return
    fi
    for ((seed = 1; seed <= seeds; seed++)); do
        # shellcheck disable=SC2086
        job 2 SOFTGPU_SEED=$seed SOFTEFA_FAULTS="$faults,seed=$seed" $settings -- "${options[@]}"
        grep -Eq ': wrong |softgpu: kernel' "$log" || continue
        notices=$((notices + 1))
        [ -n "${FERROGIN_SOAK:-}" ] || break
    done
    if [ $notices -eq 0 ]; then
        fail "$name: no seed of $seeds notices it"
    elif [ -n "${FERROGIN_SOAK:-}" ]; then
        pass "$name: noticed with $notices of $seeds seeds"
    else
        pass "$name: noticed with seed $seed"
    fi
}

nccl_ep=$("$here/fetch.sh" "$root/.cache" 2>"$log") || skip_all "$(tail -n 1 "$log")"
deep_ep=$("$here/fetch.sh" "$root/.cache" deep_ep 2>"$log") || skip_all "$(tail -n 1 "$log")"
weak=SOFTGPU_MEMORY=weak

right "LL, 2 ranks, 20 rounds" ll 2 "" "SOFTEFA_FAULTS=$faults,seed=1" rounds=20
right "LL, 8 ranks, weak memory" ll 8 "" "SOFTEFA_FAULTS=$faults,seed=2 $weak" experts=16 sms=4
right "LL, 8 ranks, two per node, weak memory" ll 8 "" "PER_NODE=2 SOFTEFA_FAULTS=$faults,seed=13 $weak" experts=16 sms=4
right "LL, FP8, rank-major, split phases, weak memory" ll 2 "-DRECIPE=DS_FP8E3M4 -DLAYOUT=RANK_MAJOR -DTOPK=3" "$weak" split=1 rounds=4
right "LL, 4 ranks, one dies and is masked" ll 4 "" "FERROGIN_ON_PEER_FAILURE=isolate SOFTEFA_FAULTS=$faults,seed=28 $weak" dies=1 rounds=6
right "LL, 4 ranks, one dies in combine and is masked" ll 4 "" "FERROGIN_ON_PEER_FAILURE=isolate SOFTEFA_FAULTS=$faults,seed=29" dies=2 late=1 rounds=6
right "HT, 2 ranks, card signals, 20 rounds" ht 2 "" "SOFTEFA_FAULTS=$faults,seed=3 FERROGIN_SIGNALS=card" rounds=20
right "HT, 8 ranks, two per node, weak memory" ht 8 "" "PER_NODE=2 SOFTEFA_FAULTS=$faults,seed=4 $weak"
right "DeepEP, 4 ranks, two per node, weak memory" deepep 4 "-DTOPK=6" "PER_NODE=2 SOFTEFA_FAULTS=$faults,seed=14 $weak"
right "DeepEP, hybrid, cached, 4 ranks, two per node, weak memory" deepep 4 "-DNODES=2 -DTOPK=4 -DCACHED=1 -DBLOCKS=4" "PER_NODE=2 SOFTEFA_FAULTS=$faults,seed=22 $weak"
right "DeepEP, a row per expert, 20 rounds, weak memory" deepep 2 "-DTOPK=6 -DEXPAND=1" "SOFTEFA_FAULTS=$faults,seed=15 $weak" rounds=20
EDITS="--with deepep-read-signal" right "DeepEP, card signals and readSignal, 20 rounds" deepep 2 "" \
    "SOFTEFA_FAULTS=$faults,seed=19 FERROGIN_SIGNALS=card" rounds=20
right "HT, NCCL's own backend, 20 rounds" ht 2 "-DNCCL_OWN_BACKEND" "FERROGIN_SIGNALS=card" rounds=20
EDITS="--with deepep-read-signal" right "DeepEP, NCCL's own backend and readSignal" deepep 2 "-DNCCL_OWN_BACKEND" \
    "SOFTEFA_FAULTS=$faults,seed=21 FERROGIN_SIGNALS=card $weak"
right "LL through NCCL's proxy and the RMA plugin, 20 rounds, weak memory" ll 2 "-DTHROUGH_PROXY" "SOFTEFA_FAULTS=$faults,seed=25 $weak" rounds=20

if [ -n "${FERROGIN_SOAK:-}" ]; then
    right "HT through NCCL's proxy and the RMA plugin" ht 2 "-DTHROUGH_PROXY" "SOFTEFA_FAULTS=$faults,seed=26 $weak" rounds=20 topk=4
    right "LL, 8 ranks, rank-major, split phases, one dies in combine and is masked" ll 8 "-DTOPK=3 -DLAYOUT=RANK_MAJOR" \
        "FERROGIN_ON_PEER_FAILURE=isolate SOFTEFA_FAULTS=$faults,seed=30 $weak" dies=5 late=1 timeout=20 split=1 experts=16 sms=4 rounds=8
    for nodes in 1 2; do
        EDITS="--with deepep-read-signal" right "DeepEP, NODES=$nodes, through NCCL's proxy and the RMA plugin" deepep 2 "-DNODES=$nodes -DTHROUGH_PROXY" \
            "SOFTEFA_FAULTS=$faults,seed=27 $weak" rounds=20
    done
    for per_node in 1 2 4; do
        for signals in emulated card; do
            right "HT, 4 ranks, $per_node per node, $signals signals" ht 4 "" \
                "PER_NODE=$per_node SOFTEFA_FAULTS=$faults,seed=20 FERROGIN_SIGNALS=$signals $weak" rounds=20 topk=4
        done
        right "LL, 4 ranks, $per_node per node" ll 4 "-DTOPK=8" "PER_NODE=$per_node SOFTEFA_FAULTS=$faults,seed=16 $weak" experts=16 sms=4 rounds=20
        for modes in "" "-DREDUCE=0" "-DEXPAND=1" "-DEXPAND=1 -DREDUCE=0" "-DCACHED=1" "-DCACHED=1 -DEXPAND=1 -DBLOCKS=4"; do
            for topk in 1 3 8; do
                right "DeepEP, 4 ranks, $per_node per node, top-k $topk, $modes" deepep 4 "-DEXPERTS=16 -DTOPK=$topk $modes" \
                    "PER_NODE=$per_node SOFTEFA_FAULTS=$faults,seed=17 $weak" rounds=4
            done
        done
    done
    for modes in "-DREDUCE=0" "-DEXPAND=1" "-DEXPAND=1 -DREDUCE=0" "-DCACHED=1 -DEXPAND=1"; do
        right "DeepEP, hybrid, 8 ranks, two per node, $modes" deepep 8 "-DNODES=4 -DEXPERTS=16 -DTOPK=6 $modes" \
            "PER_NODE=2 SOFTEFA_FAULTS=$faults,seed=23 $weak" rounds=4
    done
    for routing in even one none idle; do
        right "DeepEP, hybrid, 4 ranks, 20 rounds, routing $routing" deepep 4 "-DNODES=2 -DTOPK=6" "PER_NODE=2 SOFTEFA_FAULTS=$faults,seed=24" \
            routing=$routing rounds=20
        right "DeepEP, 2 ranks, 20 rounds, routing $routing" deepep 2 "-DTOPK=6" "SOFTEFA_FAULTS=$faults,seed=18" routing=$routing rounds=20
    done
    right "DeepEP, hidden 7168" deepep 2 "-DHIDDEN=7168 -DTOPK=8" "$weak" rounds=1
    for ranks in 2 4 8; do
        for routing in even one none idle; do
            right "LL, $ranks ranks, routing $routing" ll "$ranks" "-DTOPK=3" "SOFTEFA_FAULTS=$faults,seed=5" experts=16 sms=4 routing=$routing
            right "LL, $ranks ranks, rank-major, routing $routing, weak memory" ll "$ranks" "-DTOPK=3 -DLAYOUT=RANK_MAJOR" \
                "SOFTEFA_FAULTS=$faults,seed=6 $weak" experts=16 sms=4 routing=$routing split=1
            for signals in emulated card; do
                right "HT, $ranks ranks, $signals signals, routing $routing" ht "$ranks" "" \
                    "SOFTEFA_FAULTS=$faults,seed=7 FERROGIN_SIGNALS=$signals $weak" routing=$routing topk=3
            done
        done
    done
    for layout in EXPERT_MAJOR RANK_MAJOR; do
        for type in "-DTYPE=Bf16" "-DTYPE=Fp16" "-DTYPE=Fp32" "-DRECIPE=DS_FP8E3M4"; do
            for topk in 1 2 8; do
                right "LL, $layout, $type, top-k $topk" ll 2 "$type -DLAYOUT=$layout -DTOPK=$topk" "SOFTEFA_FAULTS=$faults,seed=8" experts=16 sms=4
            done
            right "LL, $layout, $type, hidden 7168" ll 2 "$type -DLAYOUT=$layout -DTOPK=8 -DHIDDEN=7168" "$weak" experts=16 sms=4 rounds=1
        done
    done
    for type in Bf16 Fp16 Fp32; do
        right "HT, $type, top-k 8" ht 2 "-DTYPE=$type" "SOFTEFA_FAULTS=$faults,seed=9" experts=16 topk=8 tokens=64 rounds=4
    done
    right "HT, hidden 7168" ht 2 "-DHIDDEN=7168" "" experts=16 topk=8
    right "HT, two chunks of tokens" ht 2 "-DTOKENS=128" "SOFTEFA_FAULTS=$faults,seed=10" tokens=100
    right "LL, 8 ranks, 20 rounds, weak memory" ll 8 "" "SOFTEFA_FAULTS=$faults,seed=11 $weak" experts=16 sms=4 rounds=20
    right "HT, 8 ranks, 20 rounds, weak memory" ht 8 "" "SOFTEFA_FAULTS=$faults,seed=12 $weak" rounds=20
fi

# What was found in the kernels (docs/found-elsewhere.md).
noticed "LL without the edit count-before-release" 8 ll "--without count-before-release" "" rounds=3
noticed "LL without the edit receive-barriers" 4 ll "--without receive-barriers" "$weak"
noticed "LL without the edit stores-before-put" 4 ll "--without stores-before-put" "$weak"
noticed "LL without the edit lanes-after-store" 4 ll "--without lanes-after-store" "$weak"
noticed "HT without the edit group-per-token" 4 ht "--without group-per-token" "$weak"
noticed "DeepEP without the edit deepep-padding-fence" 4 deepep "--without deepep-padding-fence" "$weak" -- -DEXPAND=1 -DTOPK=6
# A wait, fence or order removed.
noticed "LL without a proxy fence before a bulk store" 4 ll "--defect ll-store-fence" "$weak"
noticed "LL without the wait for all flags" 4 ll "--defect ll-grid-sync" "$weak"
noticed "HT without dispatch's wait for tokens" 8 ht "--defect ht-tail-wait" ""
noticed "HT without combine's wait for sums" 8 ht "--defect ht-chunk-wait" ""
# Set-ups that don't keep what the kernels rely on.
noticed "LL with card signals" 8 ll "" "FERROGIN_SIGNALS=card SOFTEFA_FAULTS=delay_us=0..100000" tokens=64 rounds=3
noticed "LL with weak order" 8 ll "" "SOFTEFA_FAULTS=reorder=1024,delay_us=0..400000" strong=0 experts=2 rounds=3
noticed "DeepEP with card signals" 1 deepep "" FERROGIN_SIGNALS=card
noticed "DeepEP, hybrid, with weak order" 8 deepep "" "SOFTEFA_FAULTS=reorder=1024,delay_us=1000..50000" strong=0 rounds=3 -- -DNODES=2
noticed "HT with weak order" 8 ht "" "SOFTEFA_FAULTS=reorder=1024,delay_us=1000..50000" strong=0 rounds=3
noticed "HT with NCCL's own backend, which has no strong signals" 8 ht "" \
    "FERROGIN_SIGNALS=card SOFTEFA_FAULTS=reorder=1024,delay_us=1000..50000" rounds=3 -- -DNCCL_OWN_BACKEND

finish
