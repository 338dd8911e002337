"""Run any script that uses torch.distributed, and explain a hang: `distlab run`."""
