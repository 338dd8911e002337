"""Checks of the unit `imagenet_trainer`: a step, an epoch, a checkpoint."""
