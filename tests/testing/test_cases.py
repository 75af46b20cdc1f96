"""Every registered member has a row in `tests/cases.py`."""

import pytest

import cases
from jaxspec.registry import DRAFTERS, SCHEDULES, find

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_has_a_row(name):
    assert name in cases.DRAFTERS, f"add a row for the drafter {name!r} to DRAFTERS in tests/cases.py"
    case, takes = cases.DRAFTERS[name], find("drafter", name).takes
    assert case.options.keys() == takes - {"tree", "draft", "heads"}, f"DRAFTERS[{name!r}] in tests/cases.py: options"
    assert (case.tree is not None) <= ("tree" in takes), f"DRAFTERS[{name!r}] in tests/cases.py: tree"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_row(name):
    assert name in cases.SCHEDULES, f"add a row for the schedule {name!r} to SCHEDULES in tests/cases.py"
    assert {type(schedule) for schedule in cases.SCHEDULES[name]} == {find("schedule", name)}
    assert find("schedule", name)() == find("schedule", name)()


def test_no_row_is_left_of_a_member_that_is_gone():
    assert cases.DRAFTERS.keys() <= set(DRAFTERS)
    assert cases.SCHEDULES.keys() <= set(SCHEDULES)
