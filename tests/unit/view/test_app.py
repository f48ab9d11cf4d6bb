"""The HTTP side: what is answered, and what is not."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette

from quiesce.threads import DaemonExecutor
from quiesce.view.app import HEADERS, make_app
from quiesce.view.backend import Backend, Content
from quiesce.view.folders import ShownRun
from tests.unit.view.rig import ask, span, write_recording

NOON = 1_800_000_000.0
BOARD = json.dumps({"uid": "quiesce-slots", "title": "Slots", "tags": ["quiesce"], "panels": []})


@dataclasses.dataclass
class Fake:
    """A backend without programs."""

    runs: list[ShownRun]
    content: Content = dataclasses.field(
        default_factory=lambda: Content(
            {"quiesce-slots": BOARD},
            lambda base: base,
            "https://docs.example/runbooks",
            lambda invariant: "QuiesceOwnershipConflict" if invariant == "single_owner" else "QuiesceOther",
        )
    )
    pool: DaemonExecutor = dataclasses.field(default_factory=lambda: DaemonExecutor("test-view", 2))
    prometheus_url: str | None = None
    prometheus_error: str = "Prometheus: it was stopped"
    alertmanager_url: str | None = None
    alertmanager_error: str = "Alertmanager: it was stopped"

    def info(self) -> dict[str, Any]:
        """Tell something."""
        return {"version": "1"}

    def exemplars(self, query: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Have none."""
        return []


@pytest.fixture
def app(tmp_path: Path) -> Starlette:
    """Return an application over a run with a trace, and over a page of two files."""
    page = tmp_path / "page"
    (page / "more").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html>")
    (page / "more" / "chart.js").write_text("export {};")
    (page / "secret.txt").write_text("not served")
    (tmp_path / "outside.js").write_text("not served")
    folder = write_recording(tmp_path / "mine", spans=[span("quiesce.checkpoint", NOON, 1.0, trace="e" * 32)])
    return make_app(cast("Backend", Fake([ShownRun(folder, run="mine", name="mine", recorded=True)])), page)


def test_the_page_and_its_files_are_served(app: Starlette) -> None:
    """With their types, for as long as they are what the browser has."""
    index, script = ask(app, "/"), ask(app, "/page/more/chart.js")

    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert ask(app, "/page/more/chart.js", headers={"if-none-match": script.headers["etag"]}).status == 304
    assert ask(app, "/page/plotly.min.js", method="HEAD").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/../outside.js",
        "/page/..%2foutside.js",
        "/page/more/../../outside.js",
        "/page//etc/passwd",
        "/page/secret.txt",
        "/page/",
        "/runbooks/..",
        "/runbooks/../index",
        "/api/dashboards/../info",
        "/api/prometheus/../../-/quit",
        "/api/prometheus/admin/tsdb/snapshot",
        "/api/prometheus/status/config",
        "/api/prometheus/label/a/b/values",
        "/api/prometheus/query/",
        "/api/trace/../../etc/passwd",
        "/api/trace/xyz",
        "/metrics",
    ],
)
def test_nothing_else_is_served(app: Starlette, path: str) -> None:
    """No path leads out of the lists."""
    assert ask(app, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_is_answered(app: Starlette, method: str) -> None:
    """Nothing can be changed through here."""
    for path in ("/", "/api/info", "/api/prometheus/query"):
        answer = ask(app, path, method=method)
        assert answer.status == 405
        assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:9470", "", "[::2]:80"])
def test_a_name_of_somebody_elses_is_refused(app: Starlette, host: str) -> None:
    """A website cannot read this by pointing a name of its own here."""
    assert ask(app, "/api/info", host=host).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "[::1]:9470", "LOCALHOST"])
def test_names_of_this_machine_are_answered(app: Starlette, host: str) -> None:
    """At any port, so that a forwarded one works."""
    assert ask(app, "/api/info", host=host).status == 200


def test_another_site_may_lead_here_but_not_ask(app: Starlette) -> None:
    """A link in a chat works; a request of a foreign page does not."""
    foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}

    assert ask(app, "/api/info", headers=foreign).status == 403
    assert ask(app, "/runbooks/", headers={**foreign, "sec-fetch-mode": "navigate"}).status == 200


def test_every_answer_has_the_headers(app: Starlette) -> None:
    """Also one that refuses; no script may stand in the page, and nobody else may read it."""
    for answer in (
        ask(app, "/"),
        ask(app, "/nothing"),
        ask(app, "/", method="POST"),
        ask(app, "/", host="x"),
    ):
        assert {name.lower(): value for name, value in HEADERS.items()}.items() <= answer.headers.items()
        assert "access-control-allow-origin" not in answer.headers
    policy = HEADERS["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "default-src 'none'" in policy


def test_dashboards_are_listed_and_served_as_they_are(app: Starlette) -> None:
    """The page draws the generated JSON itself."""
    assert ask(app, "/api/dashboards").json() == [
        {"uid": "quiesce-slots", "title": "Slots", "description": "", "tags": ["quiesce"]}
    ]
    assert ask(app, "/api/dashboards/quiesce-slots").body == BOARD.encode()
    assert ask(app, "/api/dashboards/other").status == 404


def test_a_trace_is_answered_from_the_recording(app: Starlette) -> None:
    """One that is not there says why."""
    assert [one["name"] for one in ask(app, f"/api/trace/{'e' * 32}").json()["spans"]] == [
        "quiesce.checkpoint"
    ]
    missing = ask(app, f"/api/trace/{'0' * 32}")
    assert missing.status == 404
    assert "not recorded" in missing.json()["error"]


def test_what_is_away_says_so(app: Starlette) -> None:
    """As Prometheus itself would tell an error."""
    for path in (
        "/api/prometheus/query?query=up",
        "/api/prometheus/query_exemplars?query=up&start=1&end=2",
        "/api/alerts",
    ):
        answer = ask(app, path)
        assert answer.status == 502
        assert answer.json()["errorType"] == "unavailable"
        assert "it was stopped" in answer.json()["error"]
    assert ask(app, "/api/prometheus/query?query=\xe4").status == 400


def test_open_violations_come_first(app: Starlette, tmp_path: Path) -> None:
    """Then the newest; each says of which run it is."""
    from quiesce.auditor.record import Records
    from quiesce.invariants import Violation

    records = []
    for at, groups in ((1.0, ("a",)), (2.0, ("b",)), (3.0, ("c",))):
        found = Violation("single_owner", "critical", "two owners", groups)
        record, _ = Records(int(at)).add(found, origin="cut", unix_time=at, events=[])
        records.append({"v": 1, **record.to_json(), "key": f"k{at:.0f}", "open": at != 3.0})
    (tmp_path / "mine" / "violations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))

    told = ask(app, "/api/violations").json()

    assert [(one["groups"], one["open"], one["run"]) for one in told] == [
        (["b"], True, "mine"),
        (["a"], True, "mine"),
        (["c"], False, "mine"),
    ]
    leads = {(one["alert"], one["runbook"]) for one in told}
    assert leads == {("QuiesceOwnershipConflict", "/runbooks/QuiesceOwnershipConflict")}


def test_a_page_that_is_not_there_is_told(tmp_path: Path) -> None:
    """An installation without its page says so, and serves the rest."""
    bare = make_app(cast("Backend", SimpleNamespace(info=dict)), tmp_path)

    assert ask(bare, "/").status == 404
    assert ask(bare, "/api/info").status == 200
