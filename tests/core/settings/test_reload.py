"""Every setting says what a new value needs at a reload."""

from __future__ import annotations

from typing import get_args, get_origin, get_type_hints

import attrs
import pytest

from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.settings.reload import LIVE, SERVER, WORKER, WORKER_ONLY, names_with

TABLES = {
    name: get_args(kind)[1] if get_origin(kind) is dict else kind for name, kind in get_type_hints(Settings).items()
}


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_says_what_a_new_value_needs(table: str) -> None:
    kind = TABLES[table]
    said = [names_with(kind, marks) for marks in (LIVE, WORKER, SERVER)]

    assert sorted(name for names in said for name in names) == sorted(field.name for field in attrs.fields(kind))
    assert not said[1] or kind is ModelSettings, "only models have workers"


def test_several_marks_are_all_needed() -> None:
    assert {"replay", "replay_timeout_s"} <= set(names_with(ModelSettings, LIVE | WORKER_ONLY))
    assert not {"python", "pin"} & set(names_with(ModelSettings, LIVE | WORKER_ONLY))
