from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_tables import write_tables


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Small tables, see ``write_tables``."""
    write_tables(tmp_path)
    return tmp_path
