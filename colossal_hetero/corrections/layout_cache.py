"""How shards are gathered is remembered for the groups that they are gathered over."""

from __future__ import annotations

from functools import wraps
from typing import Any

from colossalai.tensor.d_tensor.layout_converter import LayoutConverter

__all__ = ["correct"]


def correct() -> None:
    """Let the converter of layouts forget what it knows when it is asked for other process groups."""
    find: Any = LayoutConverter.layout_converting

    @wraps(find)
    def find_for_groups(converter: Any, source: Any, target: Any) -> Any:
        by_rank = source.device_mesh._process_group_dict
        groups = [group.group_name for by_axis in by_rank.values() for group in by_axis.values()]
        if getattr(converter, "groups", groups) != groups:
            converter.cached_solution.clear()
        converter.groups = groups
        return find(converter, source, target)

    LayoutConverter.layout_converting = find_for_groups
