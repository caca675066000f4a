"""How many chips, how long, how much: planning a training run before paying for it.

Each module answers one question and takes numbers, not options: `chips`, `prices`, `shapes`
(data files with source and date) → `memory` → `compute` → `money` → `planner` (joins them) →
`table` and `report` (words and JSON). `failures` and `budget` are views beside the main one.
Counts are of the whole cluster, sizes are bytes, times are seconds, money is US dollars.
"""
