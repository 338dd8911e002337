"""Trainings that the commands run and show: on real ranks, beside one process."""
