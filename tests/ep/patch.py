#!/usr/bin/env python3
"""Copies the headers of nccl_ep or DeepEP and makes the edits that the kernels need here.

usage: patch.py FROM TO [--with EDIT]... [--without EDIT]... [--defect DEFECT]...
       patch.py --list

FROM is the package's include directory. Each edit below has its reason. Those in ON_REQUEST aren't always made. A defect removes one wait, fence or order from the
kernels, for tests that notice it. Fails if an edit doesn't find its place: then the package has changed, and the list must be updated.
"""

import argparse
import pathlib
import re
import shutil
import sys

PRIMITIVES = "nccl_ep/device/device_primitives.cuh"
LL = "nccl_ep/device/ll_ep.cuh"
HT = "nccl_ep/device/ht_ep.cuh"
COMM = "deep_ep/common/comm.cuh"
PTX = "deep_ep/common/ptx.cuh"
UTILS = "deep_ep/impls/combine_utils.cuh"
COPY = "deep_ep/impls/dispatch_copy_epilogue.cuh"

# name: (file, pattern, replacement, reason)
EDITS = {
    "laneid": (
        PRIMITIVES,
        r"%laneid;",
        r"%%laneid;",
        "In inline PTX with operands, % begins an operand, and %% is the character. nvcc takes both, clang only %%.",
    ),
    "count-before-release": (
        LL,
        r"(atomic_add_release_global\(rankArrivedCnt [^;]*;)(\s*)(sharedNumRecvTokens\[[^;]*;)",
        r"\3\2\1",
        "A race: the count is stored after the releasing add that tells other warps to read it (docs/found-elsewhere.md).",
    ),
    "receive-barriers": (
        LL,
        r"(mbarrier_init\(emptyBarriers\[laneId\], numDecodeWarps\);)",
        r"\1 fence_barrier_init();",
        "A bulk copy may not see the barriers that combine's receiving part initializes (docs/found-elsewhere.md).",
    ),
    "stores-before-put": (
        LL,
        r"(// Flush all stores\s*)tma_store_wait<0>\(\);",
        r'\1asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");',
        "tma_store_wait waits until bulk stores have read, and the put that follows reads what they write (docs/found-elsewhere.md).",
    ),
    "lanes-after-store": (
        LL,
        r"tma_store_wait<0>\(\);(?=\s*#pragma unroll\s*for \(int k = 0; k < kNumRecvUnrolls \* 4)",
        r"tma_store_wait<0>(); __syncwarp();",
        "Only the lane that started the bulk store waits for it, and all lanes overwrite its source (docs/found-elsewhere.md).",
    ),
    "group-per-token": (
        HT,
        r"(?s)elect_sync\(~0\) && absolute_token_id < num_real_tokens\) \{(.*?)(cuda::ptx::cp_async_bulk_commit_group\(\);)",
        r"elect_sync(~0)) { if (absolute_token_id < num_real_tokens) {\1} \2",
        "Tokens beyond the real ones commit no group, so waits don't cover the last real ones' bulk stores (docs/found-elsewhere.md).",
    ),
    "deepep-laneid": (PTX, r"%laneid;", r"%%laneid;", "As in nccl_ep."),
    "deepep-throw": (
        UTILS,
        r"throw std::logic_error\([^;]*\);",
        r"return 0;",
        "clang compiles a constexpr function for the GPU too, which has no exceptions.",
    ),
    "deepep-padding-fence": (
        COPY,
        r"ptx::st_bulk<kNumHiddenBytes>\([^;]*;",
        r"\g<0> ptx::tma_store_fence(); __syncwarp();",
        "A bulk store may not see the zeros that the lanes store before it (docs/found-elsewhere.md).",
    ),
}

ON_REQUEST = {
    "deepep-read-signal": (
        COMM,
        r"(?s)const auto gdaki = .*?signal_idx;(.*?)ptx::ld_acquire_sys<uint64_t>\(signal_ptr\)",
        r"\1gin.readSignal(signal_idx)",
        "Card signals: the barrier polls words that only emulated signals have.",
    ),
}

# name: (file, pattern, which of its places, what is missing)
DEFECTS = {
    "ll-store-fence": (LL, r"tma_store_fence\(\);(?=\s*if \(elect_one_sync\(\)\) \{\s*tma_store_1d\()", 0, "the proxy fence before a bulk store"),
    "ll-grid-sync": (LL, r"cg::this_grid\(\)\.sync\(\);(?=\s*completeFull)", 1, "combine's wait for the flags of all ranks"),
    "ht-tail-wait": (HT, r"net\.waitSignal\(ncclCoopThread\(\), tail_signal_id, [^;]*;", 0, "dispatch's wait for other nodes' tokens"),
    "ht-chunk-wait": (HT, r"net\.waitSignal\(ncclCoopThread\(\), signal_id, [^;]*;", 0, "combine's wait for other nodes' sums"),
}


def main():
    if sys.argv[1:] == ["--list"]:
        for name, (file, _, _, reason) in (EDITS | ON_REQUEST).items():
            print(f"edit {name}, {file}: {reason}")
        for name, (file, _, _, missing) in DEFECTS.items():
            print(f"defect {name}, {file}: {missing}")
        return
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--with", dest="wanted", action="append", default=[], choices=list(ON_REQUEST))
    parser.add_argument("--without", action="append", default=[], choices=list(EDITS))
    parser.add_argument("--defect", action="append", default=[], choices=list(DEFECTS))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.target, ignore_errors=True)
    shutil.copytree(arguments.source, arguments.target)

    for name, (file, pattern, replacement, _) in (EDITS | {name: ON_REQUEST[name] for name in arguments.wanted}).items():
        # Edits of the other package don't apply.
        if name in arguments.without or not (arguments.target / file.split("/")[0]).exists():
            continue
        text, found = re.subn(pattern, replacement, (arguments.target / file).read_text())
        if found != 1:
            sys.exit(f"{file}: the edit {name} has {found} places, expected 1")
        (arguments.target / file).write_text(text)
    for name in arguments.defect:
        file, pattern, which, _ = DEFECTS[name]
        text = (arguments.target / file).read_text()
        places = list(re.finditer(pattern, text))
        if len(places) <= which:
            sys.exit(f"{file}: the defect {name} has {len(places)} places, expected at least {which + 1}")
        (arguments.target / file).write_text(text[: places[which].start()] + text[places[which].end() :])


if __name__ == "__main__":
    main()
