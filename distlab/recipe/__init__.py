"""How the capstone trains: its options, samples, losses, optimizers and schedules."""
