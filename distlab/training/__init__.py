"""Trainings that the commands run on real ranks and compare with a single process."""
