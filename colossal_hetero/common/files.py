"""JSON files that people read and edit: laid out for reading, written atomically, with mistakes named in words."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .atomic_files import replacing


def read_json(path: Path | str) -> tuple[str, Any]:
    text = read_text(path, "JSON")
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read: its lists or objects are nested too deeply") from None


def read_text(path: Path | str, file_format: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {file_format}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


LINE_LENGTH = 110
_INNERMOST = re.compile(r'[\[{]\n(?:"(?:[^"\\]|\\.)*"|[^\[\]{}"])*[\]}]')
"""A list or object with only simple values, as ``json`` lays it out; strings contain no line breaks there."""


def write_json(content: Any, path: Path | str) -> None:
    """Write a file atomically: readers see the old file or the complete new one. What is short is on one line."""
    with replacing(path) as temporary:
        text = json.dumps(content, ensure_ascii=False, indent=2)
        temporary.write_text(_INNERMOST.sub(_on_one_line, text) + "\n", encoding="utf-8")


def _on_one_line(found: re.Match[str]) -> str:
    inside = " ".join(line.strip() for line in found[0][1:-1].strip().splitlines())
    line = f"{{ {inside} }}" if found[0][0] == "{" else f"[{inside}]"
    return line if len(line) <= LINE_LENGTH else found[0]


def check_units(units: dict[str, str], read: Mapping[str, str]) -> dict[str, str]:
    if units != read:
        changed = next(name for name in [*read, *units] if units.get(name) != read.get(name))
        raise ValueError(
            f"{changed} is in {units.get(changed)!r}, but is read in {read.get(changed)!r}; "
            "the units cannot be chosen: convert the numbers, or leave the field out"
        )
    return units


def first_repeated(values: Iterable[Any]) -> Any:
    """The first value that is there twice; None if there is none."""
    return next((value for value, number in Counter(values).items() if number > 1), None)


def errors_in_words(error: ValidationError, names: Iterable[str]) -> str:
    names = list(names)
    errors = error.errors()
    # If all elements of a list are wrong, pydantic also reports the list as too short.
    deeper = {each["loc"][:end] for each in errors for end in range(len(each["loc"]))}
    return "; ".join(
        _in_words(each, names) for each in errors if not (each["type"] == "too_short" and each["loc"] in deeper)
    )


def _in_words(error: Any, names: Sequence[str]) -> str:
    place = ""
    for part in error["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    kind, limits = error["type"], error.get("ctx", {})
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden":
        close = get_close_matches(str(error["loc"][-1]), names, n=1)
        return f"{place} is not a field" + (f"; did you mean {close[0]}?" if close else "")
    words = {
        "greater_than": f"must be above {limits.get('gt')}",
        "greater_than_equal": f"must be at least {limits.get('ge')}",
        "less_than_equal": f"must be at most {limits.get('le')}",
        "finite_number": "must be a finite number",
        "too_short": "must not be empty",
        "string_too_short": "must not be empty",
        "too_long": f"must have at most {limits.get('max_length')} values",
        **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "must be a whole number"),
        **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "tuple_type": "must be a list",
        **dict.fromkeys(("model_type", "dict_type"), "must be an object"),
    }
    if kind == "value_error":
        return f"{place}: {limits['error']}" if place else str(limits["error"])
    value = repr(error["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{place} is {shown}: {words.get(kind, error['msg'])}"


MAX_SECONDS = 1e15  # about 30 million years
MAX_BYTES = 10**18
MAX_COUNT = 10**9

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
ByteCount = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Amount = Annotated[float, Field(ge=0, le=MAX_BYTES)]
BytesPerSecond = Annotated[float, Field(ge=1e-6, le=1e30)]
Flops = Annotated[float, Field(ge=1, le=1e30)]
Factor = Annotated[float, Field(ge=1e-9, le=1e12)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class FilePart(BaseModel):
    """A part of a file: immutable, unknown fields are errors, and numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


File = TypeVar("File", bound=FilePart)


def load_json_file(path: Path | str, model: type[File], **options: Any) -> File:
    """Read a JSON file; ``options`` as of :func:`check_file`."""
    text, content = read_json(path)
    return check_file(str(path), content, text, model, **options)


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
    """Sorted names in files of all fields of ``model`` and of the models in it."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return sorted({name for part in parts for name in part.get("properties", ())})
