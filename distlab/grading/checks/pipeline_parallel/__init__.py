"""Checks of the unit `pipeline_parallel`: the plans, and the executor that runs them.

A schedule is judged as a list: played by a clock of integer units, exactly, on any
number of ranks. The executor is judged on real ranks, and for time on simulated ranks.
"""
