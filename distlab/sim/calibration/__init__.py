"""This machine measured, and predictions that are checked against it."""
