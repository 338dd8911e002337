"""Programs that the tests of the trainer start under torchrun."""
