"""Checks of the unit `gradient_compression`: hooks, called with buckets, without DDP.

The parent works out what every rank sends and keeps, step by step.
"""
