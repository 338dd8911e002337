"""`distlab chaos`: faults in a real training run, and whether it survives them.

matrix      which fault at which moment in which mode, and what cannot happen
plan        one cell with its seed: which rank, which step
faults      in a rank: the fault happens, once
train       the script that is launched; train_elastic: that of standby and elastic
ledger      what the ranks write down
play        one cell on real processes
namespaces  two nodes; partition: their link is cut
judge       from the record to the cell's result, a pure function
campaign    which cells are played, and why others are not; kept: results in a file
report      tables and JSON; page: one HTML file
"""
