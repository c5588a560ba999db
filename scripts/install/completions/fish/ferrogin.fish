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
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "doctor" -d 'Says whether NCCL can use the plugin with these settings, and how to fix each problem'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "perf" -d 'Measures latencies, rates and bandwidths between ranks'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "compare" -d 'Compares two reports of perf: prints the ratios of their figures'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "plot" -d 'Plots reports of perf: latency and bandwidth against size'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "validate" -d 'Runs every check on the ranks of a job, and writes a report you can send us. Made for machines with hardware'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "trace" -d 'Prints a trace of software cards (SOFTEFA_TRACE), or decodes a work request or completion from hexadecimal digits'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "ptx" -d 'Prints the device code as PTX: the functions of ferrogin/gin.h, to link with kernels'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "run" -d 'Starts the ranks of a host API program on this host'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "verbs" -d 'Runs a verbs program on software EFA cards'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "gpu" -d 'Runs a program on software GPUs: it finds their libcuda.so.1 instead of NVIDIA\'s'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "check" -d 'Reports what a program\'s kernels and requests leave unordered, on software GPUs and software cards'
complete -c ferrogin -n "__fish_ferrogin_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -l ranks -d 'Number of ranks [default: 2, or as many as mpirun or torchrun started]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -l reps -d 'Repetitions of each part of a phase' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -l launcher -d 'How to start the ranks' -r -f -a "builtin\t'This program'
mpirun\t'The mpirun on PATH'"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand demo" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l timeout -d 'Time limit in seconds for the checks that load libraries, which all run at once [default: FERROGIN_TIMEOUT, at most 60, or 30]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l only -d 'Checks only these areas, separated by commas; the exit code covers only them' -r -f -a "plugin\t''
libfabric\t''
rdma\t''
gpu\t''
nccl\t''
limits\t''
settings\t''"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l nccl -d 'NCCL\'s library, if your program loads another one than the dynamic linker finds' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l root -d 'The directory below which /sys, /proc and /dev are read' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l json -d 'Prints the report as JSON; docs/doctor.md describes the format'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -l all -d 'Also prints the checks that passed, not only the verdict, problems and warnings'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand doctor" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s b -l begin -d 'Smallest size in bytes, optionally with a suffix K, M or G [default: 8]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s e -l end -d 'Largest size in bytes [default: 1M]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s f -l factor -d 'Ratio of each size to the one before' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s n -l iterations -d 'Measured operations per thread and size [default: 10000, fewer above 16 KiB]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s w -l warmup -d 'Operations before the measured ones [default: a tenth of the iterations]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l ranks -d 'Number of ranks [default: 2, or as many as mpirun or torchrun started]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s t -l threads -d 'Threads that post on one context, on a GPU each in its own block; barrier and alltoall use one' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s d -l depth -d 'Slots of a send queue, so how many posts may be outstanding before one waits; for rpc, concurrent calls per thread. A power of two' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s a -l aggregate -d 'Posts per burst, of which only the last rings the doorbell; for the rate' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l device -d 'What posts: CPU threads, or PTX kernels on a GPU [default: FERROGIN_DEVICE, or cpu]' -r -f -a "cpu\t'CPU threads'
cuda\t'Kernels on a GPU'"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l json -d 'Writes the results as JSON; `-` is standard output' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l csv -d 'Writes the results as CSV; `-` is standard output' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l plot -d 'Plots latency and bandwidth against size' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -l verify -d 'Compares the data and signals that arrived with those that were sent, after each measurement'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand perf" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand compare" -l fail-below -d 'Fails (exit code 4) if a median latency or a rate in AFTER is worse than this fraction of BEFORE: 0.9 allows 10 %' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand compare" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand plot" -s o -l output -d 'The file to write' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand plot" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -s o -l output -d 'The report archive, which rank 0 writes; an existing file is replaced' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l ranks -d 'Number of ranks to start on this host, if no launcher did [default: 2]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l limit -d 'Time limit in seconds for each step [default: 180, for perf 600; with --quick 90]' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l quick -d 'Runs fewer scenarios and repetitions: a minute instead of several'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -l mlx5 -d 'Validates a ConnectX card instead: the one in FERROGIN_MLX5 (`mlx5_0`), or a software one. One host is enough'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand validate" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l chrome -d 'Writes a file for chrome://tracing or ui.perfetto.dev, with a span from each request to its completion. `-` is standard output' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l process -d 'Only events of this process\'s cards' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l card -d 'Only events of the card with this number' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l qp -d 'Only events of this queue pair' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l op -d 'Only events of this operation' -r -f -a "send\t''
write\t''
read\t''
recv\t''"
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l status -d 'Only requests that completed with this status, and their completions' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l from -d 'Only events from this time on, in microseconds since the first event, as in the table' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l to -d 'Only events up to this time' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l id -d 'Only events of this request id, in decimal, or in hexadecimal after 0x' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l hex -d 'Decodes an entry from hexadecimal digits; without any, entries from standard input, separated by empty lines'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l json -d 'Prints JSON, one object per line'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l fields -d 'Also prints the fields of each work request and completion entry'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l errors -d 'Only requests that completed in error, and their completions'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -l unfinished -d 'Only requests and receives without a completion'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand trace" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand ptx" -l about -d 'Prints instead where the PTX comes from: its compiler and sources'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand ptx" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand run" -s n -l ranks -d 'Number of ranks' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand run" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand verbs" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand gpu" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand check" -l seeds -d 'Runs the program this many times, each with another schedule of its kernels\' threads and another order of the card\'s work' -r
complete -c ferrogin -n "__fish_ferrogin_using_subcommand check" -l exceptions -d 'A file of accepted reports. A line has a kind, one or two places, and a reason: `race a.cu:7 a.cu:9 : the value is a hint`' -r -F
complete -c ferrogin -n "__fish_ferrogin_using_subcommand check" -l lenient -d 'Lets a warp\'s collectives (shfl, vote, match, elect) order its lanes, as much code assumes'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand check" -l json -d 'Prints JSON, one report per line. What the program prints goes to standard error'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand check" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "demo" -d 'Exchanges values between ranks through the plugin, and measures latencies and rates'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "doctor" -d 'Says whether NCCL can use the plugin with these settings, and how to fix each problem'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "perf" -d 'Measures latencies, rates and bandwidths between ranks'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "compare" -d 'Compares two reports of perf: prints the ratios of their figures'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "plot" -d 'Plots reports of perf: latency and bandwidth against size'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "validate" -d 'Runs every check on the ranks of a job, and writes a report you can send us. Made for machines with hardware'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "trace" -d 'Prints a trace of software cards (SOFTEFA_TRACE), or decodes a work request or completion from hexadecimal digits'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "ptx" -d 'Prints the device code as PTX: the functions of ferrogin/gin.h, to link with kernels'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "run" -d 'Starts the ranks of a host API program on this host'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "verbs" -d 'Runs a verbs program on software EFA cards'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "gpu" -d 'Runs a program on software GPUs: it finds their libcuda.so.1 instead of NVIDIA\'s'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "check" -d 'Reports what a program\'s kernels and requests leave unordered, on software GPUs and software cards'
complete -c ferrogin -n "__fish_ferrogin_using_subcommand help; and not __fish_seen_subcommand_from demo doctor perf compare plot validate trace ptx run verbs gpu check help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
