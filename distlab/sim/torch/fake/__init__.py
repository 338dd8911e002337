"""Fake tensors: models that are larger than this machine, on simulated ranks."""
