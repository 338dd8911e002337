"""Load the data that the course trains on."""
