"""Run the experiments of the notebooks and the guides, and show their results."""
