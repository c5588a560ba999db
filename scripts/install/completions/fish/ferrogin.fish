# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_ferrogin_global_optspecs
    string join \n h/help V/version
end

function __fish_ferrogin_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_ferrogin_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_ferrogin_using_subcommand
    set -l cmd (__fish_ferrogin_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c ferrogin -n "__fish_ferrogin_needs_command" -s h -l help -d 'Print help'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -s V -l version -d 'Print version'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "demo" -d 'Exchanges values between ranks through the plugin, and measures latencies and rates'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "doctor" -d 'Reports whether NCCL can use the plugin with these settings, and how to fix each problem'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "perf" -d 'Measures latencies, rates and bandwidths between ranks'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "compare" -d 'Prints the ratios of two reports of perf'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "plot" -d 'Draws reports of perf: latency and bandwidth against size'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "validate" -d 'Runs every check on the ranks of a job, and writes a report you can send us: for machines with hardware'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "run" -d 'Runs the ranks of a program of the host API on this host: `ferrogin run -n 4 -- ./program`'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "ptx" -d 'Prints the device code as PTX: the functions of ferrogin/gin.h, to be linked with kernels'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "verbs" -d 'Runs a program on software cards below libibverbs: `ferrogin verbs -- fi_info -p efa`'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "trace" -d 'Prints a trace of software cards (SOFTEFA_TRACE), or decodes one work request or completion from hexadecimal digits'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "gpu" -d 'Runs a program on software GPUs: `ferrogin gpu -- PROGRAM` finds their libcuda.so.1 in place of NVIDIA\'s'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "gpu-cost" -d 'Prints what operations of the device code cost a GPU thread: dependent memory round trips, instructions, atomics, fences'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -l ranks -d 'Number of ranks [default: 2, or those that mpirun or torchrun started]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -l reps -d 'Repetitions of each part of a phase' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -l launcher -d 'Launcher of the ranks' -r -f -a "auto\t'mpirun if it is on PATH, otherwise builtin'
mpirun\t'mpirun'
builtin\t'This program'"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l timeout -d 'Limit in seconds of each check that loads libraries [default: FERROGIN_TIMEOUT, at most 60, or 30]. All of them run at once' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l only -d 'Checks only these areas, separated by commas. The exit code then covers only them' -r -f -a "plugin\t''
libfabric\t''
rdma\t''
gpu\t''
nccl\t''
limits\t''
settings\t''"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l nccl -d 'NCCL\'s library, if the program does not load the one that the dynamic linker finds' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l root -d 'The directory below which /sys, /proc and /dev are read' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l json -d 'Prints the report as JSON; docs/doctor.md describes its form'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l all -d 'Prints the facts too, and not only the verdict, problems and warnings'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s b -l begin -d 'Smallest size in bytes, with a suffix K, M or G if need be [default: 8]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s e -l end -d 'Largest size in bytes [default: 1M]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s f -l factor -d 'Ratio of a size to the one before' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s n -l iterations -d 'Operations that are measured, of each thread and size [default: 10000, and fewer above 16 KiB]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s w -l warmup -d 'Operations before the measured ones [default: a tenth of the iterations]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l ranks -d 'Number of ranks [default: 2, or those that mpirun or torchrun started]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s t -l threads -d 'Threads that post on one context, on a GPU each in a block of its own; barrier and alltoall have one' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s d -l depth -d 'Slots of a send queue, and so posts outstanding before a post waits; for rpc, calls of a thread at a time. A power of two' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s a -l aggregate -d 'Posts of a burst, of which only the last rings the doorbell; for the rate' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l device -d 'Processor that posts: CPU threads, or kernels as PTX on a GPU [default: FERROGIN_DEVICE, or cpu]' -r -f -a "cpu\t'CPU threads'
cuda\t'Kernels on a GPU'"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l json -d 'Write the results as JSON; `-` is standard output' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l csv -d 'Write the results as CSV; `-` is standard output' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l plot -d 'Draw latency and bandwidth against size' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l verify -d 'Compare the data and the signals that arrived with those that were sent, after each measurement'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand compare" -l fail-below -d 'Fail (exit code 4) if a median latency or a rate of AFTER is worse than this part of BEFORE: 0.9 allows 10 %' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand compare" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand plot" -s o -l output -d 'The picture' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand plot" -s h -l help -d 'Print help'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -s o -l output -d 'The report archive, which rank 0 writes; an older file of this name is replaced' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l ranks -d 'Number of ranks on this host, where no launcher started them [default: 2]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l limit -d 'Limit in seconds of each step [default: 180, and 600 for perf; with --quick 90]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l quick -d 'Fewer scenarios and repetitions: a minute instead of several'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l mlx5 -d 'A ConnectX card instead: that of FERROGIN_MLX5 (`mlx5_0`), or the software one. One host is enough'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand run" -s n -l ranks -d 'Number of ranks' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand run" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand ptx" -l about -d 'Prints the origin of the PTX instead: its compiler and sources'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand ptx" -s h -l help -d 'Print help'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand verbs" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l chrome -d 'Writes a file for chrome://tracing or ui.perfetto.dev: a span from each request to its completion. `-` is standard output' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l process -d 'Events of the cards of this process' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l card -d 'Events of the card with this number' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l qp -d 'Events of this queue pair' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l op -d 'Events of this operation' -r -f -a "send\t''
write\t''
read\t''
recv\t''"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l status -d 'Requests that completed with this status, and their completions' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l from -d 'Events from this time on, in microseconds since the first event, as the table has them' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l to -d 'Events up to this time' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l id -d 'Events of this request id: a decimal number, or 0x and a hexadecimal one' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l hex -d 'Decodes one entry from hexadecimal digits, or entries with empty lines between them from standard input'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l json -d 'Prints JSON: an object a line'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l fields -d 'Prints the fields of each work request and completion entry too'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l errors -d 'Requests that completed in error, and their completions'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l unfinished -d 'Requests and receives without a completion'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand gpu" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand gpu-cost" -l threads -d 'The numbers of threads that make the call at once, as one block' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand gpu-cost" -l seed -d 'The seed of the threads\' interleaving' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand gpu-cost" -l module -d 'A PTX file with the functions of `ferrogin/gin.h` in place of the tool\'s own device code' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand gpu-cost" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "demo" -d 'Exchanges values between ranks through the plugin, and measures latencies and rates'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "doctor" -d 'Reports whether NCCL can use the plugin with these settings, and how to fix each problem'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "perf" -d 'Measures latencies, rates and bandwidths between ranks'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "compare" -d 'Prints the ratios of two reports of perf'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "plot" -d 'Draws reports of perf: latency and bandwidth against size'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "validate" -d 'Runs every check on the ranks of a job, and writes a report you can send us: for machines with hardware'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "run" -d 'Runs the ranks of a program of the host API on this host: `ferrogin run -n 4 -- ./program`'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "ptx" -d 'Prints the device code as PTX: the functions of ferrogin/gin.h, to be linked with kernels'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "verbs" -d 'Runs a program on software cards below libibverbs: `ferrogin verbs -- fi_info -p efa`'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "trace" -d 'Prints a trace of software cards (SOFTEFA_TRACE), or decodes one work request or completion from hexadecimal digits'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "gpu" -d 'Runs a program on software GPUs: `ferrogin gpu -- PROGRAM` finds their libcuda.so.1 in place of NVIDIA\'s'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "gpu-cost" -d 'Prints what operations of the device code cost a GPU thread: dependent memory round trips, instructions, atomics, fences'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate run ptx verbs trace gpu gpu-cost help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
