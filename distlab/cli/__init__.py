"""`distlab`, the command line: thin, one module per verb."""
