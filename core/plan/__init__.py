"""How many chips, how long, how much: planning a training run before paying for it.

Packages: counting (parameters, operations), device (memory, time and search of layouts), stops
(failures and checkpoints), money, serving (generation) and output (table, JSON, plots, launch
files). Facts that age lie in data/*.toml with source and date. `answer` joins everything.
Counts are of the whole cluster, sizes are bytes, times are seconds, money is US dollars.
"""
