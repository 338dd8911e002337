"""What the notebooks and the guides run and show."""
