"""Calls of tools and the tools' declarations, as people have them: objects, JSON texts, or structs of Arrow."""

import ast
import json
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any

from common.base.errors import BadInputError, begin_of
from common.data.rows import Row

CALL = "{'type': 'function', 'function': {'name': ..., 'arguments': {...}}}"
DECLARATION = "[{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}]"
NULL_IN_SCHEMA = re.compile(r'\bnull\b|"nullable": true')  # in JSON Schema's ways, or OpenAI's


def from_json(value: object) -> object:
    """Return what a text holds as JSON; a text that holds none, and anything else, as it is."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def from_text(value: object) -> object:
    """Return what a text holds as JSON, or else as Python writes lists, as tables of pandas have them."""
    found = from_json(value)
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ast.literal_eval(found) if isinstance(found, str) else found
    return found


def with_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message whose `tool_calls` are a list of calls with names and objects of arguments, or are left out."""
    calls = from_text(message.get("tool_calls") or None)
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        raise BadInputError(f"{where} has `tool_calls` that are no list: {begin_of(calls)}; give it [{CALL}].")
    if message["role"] != "assistant":
        raise BadInputError(f"{where} has `tool_calls` in a message of the role {message['role']!r}: correct it.")
    return {**message, "tool_calls": [_call(from_text(call), where) for call in calls]}


def _call(call: object, where: str) -> dict[str, Any]:
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInputError(f"{where} has a call of a tool without a name: {begin_of(call)}; give it {CALL}.")
    arguments = from_json(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise BadInputError(
            f"{where} calls {function['name']!r} with arguments that are no JSON object: {begin_of(arguments)!r}; give "
            "it {'name': value, ...}."
        )
    called = {**function, "arguments": arguments}
    return called if function is call else {**call, "function": called}


def with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as a JSON text, for templates that take no other."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(_with_text, calls))} if calls else message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    if call.get("function"):
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def with_tools(row: Row, where: str) -> Row:
    """Return a row with its `tools` as a list of objects, or without any where that is empty; refuse anything else."""
    tools = from_text(row.get("tools"))  # a text, as tables hold them
    if tools in (None, []) or (isinstance(tools, str) and not tools.strip()):
        return {name: value for name, value in row.items() if name != "tools"}
    tools = [_declared(from_text(tool)) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadInputError(f"{where} has `tools` that are no list of objects: {begin_of(tools)}; give {DECLARATION}.")
    return {**row, "tools": tools}


def _declared(tool: object) -> object:
    """Return a declaration with its parameters as an object; Arrow keeps different ones best as JSON texts."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _declared(tool["function"])}
    return {**tool, "parameters": from_text(tool["parameters"])} if "parameters" in tool else tool


def as_written(row: Row) -> Row:
    """Return a row of Arrow without the nulls that stand for other rows' keys, in calls of tools and in declarations.

    An argument that is null stays where a tool of the row allows null for it; JSON in a text has its own keys alone.
    """
    tools = _without_nulls(row.get("tools"), is_inside=True)
    nullable = set(_nullable(tools))
    changed = {column: _without_nulls(value, nullable) for column, value in row.items()}
    return {**changed, "tools": tools} if "tools" in row else changed


def _nullable(declared: object) -> Iterator[str]:
    """Yield the names of the parameters that the declarations of tools allow to be null, by their JSON schemas."""
    declared = from_text(declared)
    if isinstance(declared, list):
        for each in declared:
            yield from _nullable(each)
    elif isinstance(declared, dict):
        for name, schema in declared.items():
            yield from _nullable(schema)
            if name == "properties" and isinstance(schema, dict):
                yield from (each for each in schema if NULL_IN_SCHEMA.search(json.dumps(schema[each], default=str)))


def _without_nulls(value: Any, nullable: Set[str] = frozenset(), is_inside: bool = False) -> Any:
    """Return a value without keys of null inside calls of tools, but for those that are `nullable`."""
    if isinstance(value, list):
        return [_without_nulls(each, nullable, is_inside) for each in value]
    if isinstance(value, dict):
        return {
            key: _without_nulls(each, nullable, is_inside or key == "tool_calls")
            for key, each in value.items()
            if each is not None or not is_inside or key in nullable
        }
    return value
