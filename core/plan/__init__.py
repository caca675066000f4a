"""Plan a training run before paying for it: number of chips, time and cost.

Packages: counting (parameters, FLOPs), device (memory, step time and search of layouts), stops
(failures, preemptions and checkpoints), money, serving (generation) and output (table, JSON, plots,
launch scripts). Facts that change over time are in data/*.toml with source and date, the tensors
that a layer keeps in data/kept.txt, and the texts of reports in data/lines.txt. `answer` runs one
call. Counts are of the whole cluster, sizes are bytes, times are seconds, money is US dollars.
"""
