"""The workbench of the course: runs, grades, explains and draws what you wrote."""

__version__ = "0.1.0"
