"""Describe the tutor's functions as tools that an agent framework can call."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypedDict

from distlab.tutor.explaining import explain_ddp_concepts
from distlab.tutor.lessons import check, hint, next_task, solution, why_did_it_hang
from distlab.tutor.trainings import compare_ddp_vs_single, run_ddp_simulation

_FUNCTIONS: tuple[Callable[..., dict[str, Any]], ...] = (
    run_ddp_simulation,
    explain_ddp_concepts,
    compare_ddp_vs_single,
    next_task,
    check,
    hint,
    why_did_it_hang,
    solution,
)
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


class Tool(TypedDict):
    """A tool, whose `callable` takes the properties of the JSON schema."""

    name: str
    description: str
    input_schema: dict[str, Any]
    callable: Callable[..., dict[str, Any]]


def get_tools() -> list[Tool]:
    """Return each of the tutor's functions as a tool."""
    return [
        Tool(
            name=function.__name__,
            description=description_of(function),
            input_schema=_schema_of(function),
            callable=function,
        )
        for function in _FUNCTIONS
    ]


def description_of(function: Callable[..., Any]) -> str:
    """Return the function's docstring without its Raises section."""
    text = inspect.getdoc(function) or ""
    return text.partition("\nRaises:")[0].strip()


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    properties = {
        name: _property(hints[name], parameter)
        for name, parameter in parameters.items()
    }
    required = [name for name, p in parameters.items() if p.default is p.empty]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _property(hint: Any, parameter: inspect.Parameter) -> dict[str, Any]:
    kinds = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    schema: dict[str, Any] = {"type": _TYPES[kinds[0]]}
    if parameter.default not in (parameter.empty, None):
        schema["default"] = parameter.default
    return schema
