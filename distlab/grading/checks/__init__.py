"""One module per unit: its scenarios (run on ranks) and its checks (run here)."""
