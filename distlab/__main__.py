"""`python -m distlab` is the same as `distlab`."""

from distlab.cli.app import main

main()
