# SPDX-License-Identifier: Apache-2.0
"""The page of the report in a real browser: it draws, it can be used, it asks for nothing."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import NAMES, Browser, find_browser
from recorded_job import RecordedJob

from nvidia_resiliency_ext.shared_utils.events import CycleEnd, CycleStart, Fault, FirstStep, JobEnd
from nvidia_resiliency_ext.shared_utils.report import build_timeline, render_html

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

_EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"


def _page() -> str:
    files = []
    for host, first in (("n1", 0), ("n2", 4)):
        job = RecordedJob(host=host, job_id=f"job {_EVIL}")
        for cycle in range(3):
            begin = cycle * 60
            job.at(begin, CycleStart(world_size=8, reason=_EVIL), cycle)
            for rank in range(first, first + 4):
                job.at(begin + 5, FirstStep(dur_s=4.0), cycle, rank=rank)
            job.at(
                begin + 50, Fault(cause="hang_section", what=_EVIL, late_s=0.1), cycle, rank=first
            )
            job.at(begin + 55, CycleEnd(result="failed"), cycle)
        files.append(job.at(180, JobEnd(result="failed", exit_code=1), None).file())
    return render_html(build_timeline(files))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """Return a browser that shows the page of a job of two nodes with faults."""
    program = find_browser()
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed: tools/install_browser.sh does it")
    page = tmp_path / "report.html"
    page.write_text(_page())
    shown = Browser(program, tmp_path / "profile", page.as_uri())
    yield shown
    shown.close()


def _colours(png: bytes) -> tuple[int, int, int]:
    """Return width, height and the number of different pixels of a picture."""
    width, height, depth, kind = struct.unpack(">IIBB", png[16:26])
    channels = {2: 3, 6: 4}[kind]
    assert depth == 8
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    raw = zlib.decompress(data)
    # Filtered rows: not the colours themselves, but a blank picture has next to none of these.
    return width, height, len({raw[i : i + channels] for i in range(0, len(raw), channels)})


def _problems(browser: Browser) -> list[object]:
    bad = ("Runtime.exceptionThrown", "Log.entryAdded")
    return [event for event in browser.events if event.get("method") in bad]


def test_page_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """Lanes and bars can be seen; no error, no script out of the record, no request."""
    assert browser.run("document.querySelectorAll('#lanes rect').length") > 20
    assert browser.run("document.querySelectorAll('#lanes .fault').length") >= 6
    visible = browser.run(
        "[...document.querySelectorAll('#lanes rect')].filter(e =>"
        " e.getBoundingClientRect().width > 1 && e.getBoundingClientRect().height > 1).length"
    )
    assert visible > 10
    fills = browser.run(
        "[...new Set([...document.querySelectorAll('#lanes > rect')].map("
        "e => getComputedStyle(e).fill))].length"
    )
    assert fills >= 3
    wide = browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert wide, "the page is wider than the window"
    assert browser.run("window.evil") is None
    png = browser.picture()
    (tmp_path / "report.png").write_bytes(png)
    width, height, colours = _colours(png)
    assert (width, height) >= (1000, 500)
    assert colours > 100
    assert not _problems(browser)
    requests = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert all(url.endswith("report.html") for url in requests)


def test_buttons_work(browser: Browser) -> None:
    """A click enlarges the time line and makes it small again, another changes light and dark."""
    width = "document.getElementById('lanes').getBoundingClientRect().width"
    before = browser.run(width)
    browser.click("#in")
    assert browser.run(width) == pytest.approx(2 * before, rel=0.01)
    browser.click("#out")
    assert browser.run(width) == pytest.approx(before, rel=0.01)
    background = "getComputedStyle(document.body).backgroundColor"
    colour, picture = browser.run(background), browser.picture()
    browser.click("#theme")
    assert browser.run(background) != colour
    assert browser.picture() != picture
    browser.click("#theme")
    assert browser.run(background) == colour
    assert not _problems(browser)


_BROKEN_WORDS = """
[...document.querySelectorAll('h1, h2, th, td')].flatMap(cell => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), broken = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    for (const word of node.data.matchAll(/\\w+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1)
        broken.push(word[0]);
    }
  return broken;
}).join(' ')
"""


def test_no_word_is_broken(browser: Browser) -> None:
    """Headings and cells of tables break between words, in a narrow window too."""
    browser.run("document.body.style.width = '420px'")
    assert browser.run("document.querySelectorAll('td').length") > 20
    assert browser.run(_BROKEN_WORDS) == ""
