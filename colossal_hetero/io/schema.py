"""Files with a schema version: their base class, and reading them with all mistakes named in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .json_files import errors_in_words, read_json

__all__ = ["FilePart", "check_file", "field_names", "load_json_file"]


class FilePart(BaseModel):
    """A part of a file: immutable, unknown fields are errors, and numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


File = TypeVar("File", bound=FilePart)


def load_json_file(
    path: Path | str,
    model: type[File],
    *,
    kind: str,
    schema: int,
    remedy: str = "",
    other_kind: Callable[[Mapping[str, Any]], str | None] = lambda content: None,
) -> File:
    """Read a JSON file; arguments as in :func:`check_file`.

    Raises:
        ValueError: There is no such file, it is not JSON, or as :func:`check_file`.
    """
    text, content = read_json(path)
    return check_file(str(path), content, text, model, kind=kind, schema=schema, remedy=remedy, other_kind=other_kind)


def check_file(
    name: str,
    content: Any,
    json_text: str,
    model: type[File],
    *,
    kind: str,
    schema: int,
    remedy: str = "",
    other_kind: Callable[[Mapping[str, Any]], str | None] = lambda content: None,
) -> File:
    """Check what was read from a file: its schema version and all its fields.

    Args:
        name: Name of the file, for messages.
        content: What was read.
        json_text: The same as JSON. In JSON, strict checks take a list for a tuple.
        model: The fields of the whole file. One of them has the alias "schema".
        kind: What the file should be, e.g. "plan".
        schema: The schema version that is read.
        remedy: What to do about a file of another version.
        other_kind: Says in words why ``content`` is another kind of file; None if it is not.

    Raises:
        ValueError: It is another kind of file, has another schema version, or has fields that are wrong, missing or
            unknown (all of them are named).
    """
    if not isinstance(content, Mapping) or "schema" not in content:
        raise ValueError(f'{name} is not a {kind}: it has no "schema"')
    if content["schema"] != schema or isinstance(content["schema"], bool):
        advice = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name} has schema {content['schema']!r}, this version reads schema {schema}{advice}")
    reason = other_kind(content)
    if reason is not None:
        raise ValueError(f"{name} is not a {kind}: {reason}")
    try:
        return model.model_validate_json(json_text, strict=True)
    except ValidationError as error:
        raise ValueError(f"{name}: {errors_in_words(error, field_names(model))}") from None


def field_names(model: type[BaseModel]) -> list[str]:
    """Names of all fields of ``model`` and of the models in it, as they are in the file; sorted."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return sorted({name for part in parts for name in part.get("properties", ())})
