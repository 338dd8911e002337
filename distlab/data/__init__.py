"""The data that the course trains on."""
