"""Experiments that the commands and the notebooks run and show."""
