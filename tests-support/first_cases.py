# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest: with `--first-cases` each parametrized test runs with its first values only.

A wheel that is tested alone must find all that it imports and starts; other values of the same
test would show nothing more of that.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--first-cases`."""
    parser.addoption("--first-cases", action="store_true", help="first values of each test only")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first of the tests that stem from one function."""
    if not config.getoption("first_cases"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()
