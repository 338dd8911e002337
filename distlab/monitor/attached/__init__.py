"""The folder that `distlab.launch --monitor` puts first on the ranks' PYTHONPATH."""
