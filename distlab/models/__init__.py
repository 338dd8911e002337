"""The small models that the course trains."""
