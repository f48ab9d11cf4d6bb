"""Runbook pages."""

import re
from pathlib import Path

import pytest

from quiesce.view.runbooks import FOLDERS, find_runbooks, render_runbook
from quiesce_dashboards.alerts import alerts

WEB = "https://docs.example/runbooks"


def test_every_alert_has_a_page_whose_links_lead_somewhere() -> None:
    """A link to a runbook stays here, one to another page leads to the documentation, none is left as a file."""
    pages = find_runbooks()

    assert {alert.name for alert in alerts()} <= pages.keys()
    for name in pages:
        text = render_runbook(name, pages, WEB)
        assert text is not None
        links = re.findall(r'href="([^"]*)"', text)
        assert links
        assert [link for link in links if not link.startswith(("/", "#", "https:"))] == []
        assert {
            link.removeprefix("/runbooks/").partition("#")[0]
            for link in links
            if link.startswith("/runbooks/")
        } <= {
            "",
            *pages,
        }


def test_tables_and_code_are_drawn() -> None:
    """A page is HTML, and has no script."""
    text = render_runbook("QuiesceDrainSlow", find_runbooks(), WEB)

    assert text is not None
    assert "<table>" in text
    assert "<pre><code" in text
    assert "<script" not in text


def test_a_name_that_is_no_page_is_none(tmp_path: Path) -> None:
    """Whatever it is made of."""
    pages = find_runbooks()

    assert render_runbook("../how-to/first", pages, WEB) is None
    assert render_runbook("QuiesceNothing", pages, WEB) is None
    assert find_runbooks((tmp_path,)) == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_pages_are_looked_for_in_the_package_and_in_the_checkout(folder: Path) -> None:
    """Both have the same name at their end."""
    assert folder.name == "runbooks"
