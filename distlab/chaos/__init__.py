"""`distlab chaos`: cause faults in a real training run, and see if it survives them.

matrix      every fault, moment and mode, and the combinations that can't happen plan
one cell and its seed, which decide on the rank and the step faults      runs in a rank
and makes the fault happen once train       the script that is launched; train_elastic:
that of standby and elastic ledger      the log that each rank keeps play        runs
one cell with real processes namespaces  creates two nodes; partition: cuts the link
between them judge       a pure function from the record of a run to the result of its
cell campaign    decides which cells run, and why others don't; kept: results in a file
report      tables and JSON; page: one HTML file
"""
