"""Checks of the unit `tensor_parallel`, a file per task.

Everything is float64 and compared with the same in one process, forward, backward and
over some steps; what is sent is read from the journal.
"""
