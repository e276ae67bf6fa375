# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest: write how many tests passed, and which failed and how, to `--outcomes FILE`.

`tools/dev.py` reads the file: it runs what failed once more. The file is written when the run ends,
so a run that was cut short has none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from results import counts_at_once

# xdist says so of the test that a worker ran when it died.
_CRASHED = "???"


class Outcomes:
    """Collects the reports of one run; with xdist in the process that receives them all."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._passed: set[str] = set()
        self._skipped = 0
        self._failed: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's result; note a failure of its set-up, its call or its tear-down."""
        if report.failed:
            again = report.when != _CRASHED and "no_second_try" not in report.keywords
            self._note(report, again=again)
        elif report.skipped:
            self._skipped += 1
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be imported: a second run would say the same."""
        if report.failed:
            self._note(report, again=False)

    def pytest_sessionfinish(self) -> None:
        """Write what was collected."""
        record = {
            "passed": len(self._passed - self._failed.keys()),
            "skipped": self._skipped,
            "failed": list(self._failed.values()),
        }
        self._target.write_text(json.dumps(record))

    def _note(self, report: pytest.TestReport | pytest.CollectReport, *, again: bool) -> None:
        parts = [report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)]
        # The first failure decides: what a failed test leaves behind says nothing.
        first = {"id": report.nodeid, "again": again, "text": ""}
        noted = self._failed.setdefault(report.nodeid, first)
        noted["text"] += "\n".join([f"{report.nodeid}, {report.when}:", *parts, ""])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Mark a test whose result is wrong; the report is made after this."""
    if call.excinfo is not None and counts_at_once(call.excinfo.value):
        item.add_marker("no_second_try")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--outcomes FILE`."""
    parser.addoption("--outcomes", type=Path, help="write which tests failed, and how, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Collect where the reports arrive, which is not in a worker of xdist."""
    target = config.getoption("outcomes")
    if target is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(target), "nvrx-outcomes")
