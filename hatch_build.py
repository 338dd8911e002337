"""Put the course's single files into the wheel; pyproject.toml names the folders."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ("AGENTS.md", "GLOSSARY.md", "curriculum.toml")


class Course(BuildHookInterface):
    """A hook, because hatchling's own table would also apply to `pip install -e`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a wheel that doesn't point to the clone."""
        if version != "editable":
            build_data["force_include"] |= {f: f"distlab/course/{f}" for f in FILES}
