"""The runbooks: one page an alert, whole, and nothing that does not exist in them."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from quiesce_dashboards.alerts import INVARIANT_ALERTS, alerts
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.queries import check_expression

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
HEADINGS = ["Meaning", "Impact", "First look", "Likely causes", "Fix", "When to silence"]
ALERTS = {alert.name: alert for alert in alerts()}
PAGES = {
    path.stem: path.read_text(encoding="utf-8") for path in RUNBOOKS.glob("*.md") if path.stem != "index"
}


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    """Neither is there without the other."""
    assert set(PAGES) == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_a_page_has_every_part(name: str) -> None:
    """The fixed headings, in order, each with something under it; the title and the severity are the alert's."""
    title, *parts = re.split(r"^## ", PAGES[name], flags=re.MULTILINE)

    assert title == f"# {name}\n\nSeverity: {ALERTS[name].severity}.\n\n"
    assert [part.partition("\n")[0] for part in parts] == HEADINGS
    assert all(len(part.partition("\n")[2].split()) >= 8 for part in parts)


@pytest.mark.parametrize("name", ALERTS)
def test_a_page_fits_its_alert(name: str) -> None:
    """A page names the invariants of its alert."""
    for invariant, alert in INVARIANT_ALERTS.items():
        if alert == name and invariant != "checkpoint_progress":
            assert f"`{invariant}`" in PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_the_expressions_of_a_page_can_be_asked(name: str) -> None:
    """Every PromQL block parses and names what the catalogue has."""
    for block in re.findall(r"^ *```promql\n(.*?)```", PAGES[name], re.MULTILINE | re.DOTALL):
        check_expression(block)


def test_the_index_lists_every_page() -> None:
    """Each with its own row, under its severity."""
    critical, warning = (RUNBOOKS / "index.md").read_text(encoding="utf-8").split("## Warning")
    for name, alert in ALERTS.items():
        row = f"| [{name}]({name}.md) | "
        assert row in (critical if alert.severity == "critical" else warning)


def test_the_index_lists_every_number() -> None:
    """Each key that a file may have, in its order, with its default."""
    part = (
        (RUNBOOKS / "index.md").read_text(encoding="utf-8").partition("## The numbers")[2].partition("## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", part, re.MULTILINE)
    told = {key: yaml.safe_load(default) for key, default in rows}

    assert told == dataclasses.asdict(AlertConfig())
    assert list(told) == [each.name for each in dataclasses.fields(AlertConfig)]


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_somewhere(name: str) -> None:
    """Each relative link is a page that is there."""
    for link in re.findall(r"\]\(([^)#]+\.md)", PAGES[name]):
        assert (RUNBOOKS / link).exists(), link
