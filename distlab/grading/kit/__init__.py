"""What the checks of several units use."""
