"""A package per unit: its scenarios (run on ranks) and its judges (run here).

A judge's docstring begins with letters for what it reads of the records:

    V  values, against a single process in float64     X  agreement between ranks
    J  the journal: calls, their order and shapes      B  bytes and messages sent
    O  order of communication within backward()        M  bytes that a rank holds
    T  virtual time, or rounds                         F  faults: crashes, losses
    L  that no rank is left waiting                    R  a run that is resumed
    P  properties that hold for any seed               S  what a call leaves behind
"""
