"""The web application, in this process and without a port."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from penstock.explore.choices import choices
from penstock.explore.evaluate import evaluate
from penstock.explore.presets import PRESETS
from penstock.explore.state import parse_state
from penstock.files.text import MAX_BYTES

testclient = pytest.importorskip("starlette.testclient", reason="needs the extra explore")

from penstock.explore.app import make_app  # noqa: E402

VOID = {"meta", "link", "input", "br"}
HOST = "http://127.0.0.1:1234"


class Reader(HTMLParser):
    """Checks that tags close in order, and collects ids and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def client():
    """A client of the application."""
    return testclient.TestClient(make_app(), base_url=HOST)


def test_the_page_stands_on_its_own(client):
    """Nothing is loaded from anywhere else, and every input has a label."""
    answer = client.get("/")
    tags = Reader(answer.text).tags
    addresses = [
        value
        for _, attributes in tags
        for name, value in attributes.items()
        if name in ("src", "href", "action")
    ]
    assert all(value.startswith(("/", "data:")) for value in addresses)
    for address in addresses:
        if address.startswith("/"):
            assert client.get(address).status_code == 200
    labelled = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    for tag, attributes in tags:
        if tag in ("input", "select"):
            assert attributes.get("id") in labelled or attributes.get("aria-label")
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_answers_forbid_what_the_page_does_not_need(client):
    """A name with markup could not load a script even if escaping failed."""
    for address in ("/", "/evaluate", "/more", "/static/explore.js", "/static/none"):
        headers = client.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
def test_the_page_of_a_link_has_its_fields_and_figures(client, preset):
    """Also without scripts."""
    tags = Reader(client.get(f"/?{preset.query}").text).tags
    state = parse_state(preset.query)
    values = {
        attributes["name"]: attributes.get("value")
        for tag, attributes in tags
        if tag == "input" and "name" in attributes
    }
    texts = state.texts()
    assert values == {name: texts.get(name, "") for name in values}
    assert {"ranks", "forward", "memory_limit"} <= values.keys()
    assert ("svg" in [tag for tag, _ in tags]) is True


def test_figures_of_the_page_are_those_of_the_simulator(client):
    """The timeline, the table and the link of an answer are of one state."""
    query = "ranks=4&micro_batches=8&a=zb-h1&b=interleaved&activation_bytes=1MiB"
    answer = client.get(f"/evaluate?{query}").json()
    assert answer["problems"] == {}
    panels = evaluate(parse_state(query))
    for panel, data in zip(panels, answer["data"]["panels"], strict=True):
        timeline = panel.result.timeline
        assert data["makespan"] == pytest.approx(timeline.makespan)
        assert sum(len(rank["t"]) for rank in data["ranks"]) == len(timeline.log.start)
        assert f"{100 * timeline.bubble_ratio:.1f} %" in answer["fragments"]["figures"]
    assert parse_state(answer["query"]) == parse_state(query)


@pytest.mark.parametrize("name", sorted(choices()))
def test_every_schedule_has_an_answer(client, name):
    """With a picture, or a message in its place."""
    answer = client.get(f"/evaluate?ranks=4&micro_batches=8&a={name}").json()
    assert answer["data"]["panels"]
    assert not Reader(answer["fragments"]["figures"]).open
    more = client.get(f"/more?ranks=2&micro_batches=2&a={name}").json()
    assert not Reader(more["more"]).open


def test_a_refused_schedule_leaves_the_other(client):
    """Its message is in its panel."""
    answer = client.get("/evaluate?ranks=3&a=chimera&b=1f1b").json()
    assert len(answer["data"]["panels"]) == 1
    assert "chimera" in answer["fragments"]["about-a"]
    assert 'role="alert"' in answer["fragments"]["about-a"]
    nothing = client.get("/evaluate?ranks=3&a=chimera").json()
    assert nothing["data"] is None
    assert client.get("/more?ranks=3&a=chimera").status_code == 200


def test_large_pipelines_are_shown_as_shares_of_time(client):
    """An answer of megabytes would not arrive while a slider moves."""
    answer = client.get("/evaluate?ranks=32&micro_batches=128&a=1f1b")
    rank = answer.json()["data"]["panels"][0]["ranks"][0]
    assert rank["t"] == []
    assert set(rank["share"]) == {"F", "B", "U"}
    assert len(answer.content) < 200_000


@pytest.mark.parametrize(
    "query",
    [
        "ranks=x",
        "a=<script>alert(1)</script>",
        "<script>alert(1)</script>=1",
        "forward=%22%3E%3Cimg%20src=x%3E",
        "a=1f1b&a.%3Cb%3E=1",
        "ranks=%00",
        "ranks=%ff%fe",
        "a=1f1b&forward=" + "1" * 5000,
        "&&&===",
        "x" * 20_000,
    ],
)
def test_a_hostile_link_gives_a_page_with_a_message(client, query):
    """Nothing of a link becomes markup."""
    page = client.get(f"/?{query}")
    assert page.status_code == 200
    tags = Reader(page.text).tags
    assert "img" not in [tag for tag, _ in tags]
    assert [tag for tag, attributes in tags if tag == "script" and "src" not in attributes] == []
    answer = client.get(f"/evaluate?{query}")
    assert answer.status_code == 200
    assert answer.json()["problems"] or query == "&&&==="


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1234"}, 200),
        ({"host": "[::1]:1234"}, 200),
        ({"host": "LOCALHOST"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:1234"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": HOST}, 200),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_are_refused(client, headers, status):
    """By name (DNS rebinding) and by origin; on every route."""
    for address in ("/evaluate", "/more"):
        assert client.get(address, headers=headers).status_code == status
    if "sec-fetch-site" not in headers:
        assert client.get("/", headers=headers).status_code == status
        upload = client.post("/upload", headers=headers, content="[]")
        assert upload.status_code == status


def test_a_link_may_be_followed_from_another_site(client):
    """That is what links are for; the other site cannot read the page."""
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_a_server_for_other_machines_answers_to_every_name_but_not_to_other_origins():
    """Its own names are unknown to it."""
    client = testclient.TestClient(make_app(None), base_url="http://server.example:80")
    assert client.get("/evaluate").status_code == 200
    refused = client.get("/evaluate", headers={"origin": "https://evil.example"})
    assert refused.status_code == 403


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "one profile, one plan"),
        (b'[["a", "{}"], ["b", "{}"], ["c", "{}"]]', "one profile, one plan"),
        (b'[["<b>.json", "{}"]]', "<b>.json is neither"),
        (b'{"a": 1}', "is no list of files"),
        (b'[["a", 1]]', "is no list of files"),
        (b"\xff\xfe", "not UTF-8"),
        (b'[["a", "\\u0000"]]', "NUL"),
    ],
)
def test_a_bad_upload_is_a_message(client, body, message):
    """The page keeps its state."""
    answer = client.post("/upload", content=body)
    assert answer.status_code == 200
    assert message in answer.json()["problem"]


def test_an_upload_has_a_size_limit(client):
    """It is refused while it arrives, before it fills the memory."""
    answer = client.post("/upload", content=b" " * (MAX_BYTES + 1))
    assert answer.status_code == 413
    assert "longer than" in answer.json()["problem"]


def test_only_the_page_s_own_files_are_served(client):
    """Names are compared, never opened."""
    for name in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "page.html", ""):
        assert client.get(f"/static/{name}").status_code == 404
    assert client.post("/evaluate").status_code == 405


def test_the_style_sheet_has_a_dark_side_and_closes_its_braces(client):
    """It is joined from those of the drawings and of the page."""
    style = client.get("/static/explore.css").text
    assert style.count("{") == style.count("}")
    assert "prefers-color-scheme:dark" in style
    assert not re.search(r"@import|url\((?!#)", style)


def test_a_missing_library_is_named(monkeypatch):
    """With the command that installs it."""
    import sys

    from penstock.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[explore\]'"):
        make_app()


def test_a_profile_is_opened(client):
    """Its costs come back as fields of the page."""
    layer = {
        "name": "<b>",
        "kind": "Linear",
        **{
            phase: {"sizes": [1], "median_s": [0.5], "spread_s": []}
            for phase in ("forward", "backward", "input_grad", "weight_grad")
        },
        "parameters": 1,
        "parameter_bytes": 4,
        "buffer_bytes": 0,
        "activation_bytes_per_sample": 8,
        "output_bytes_per_sample": 8,
    }
    profile = {
        "layers": [layer, layer],
        "fingerprint": "0",
        "input_bytes_per_sample": 8,
        "batch": 4,
        "schema": 1,
    }
    body = json.dumps([["p.json", json.dumps(profile)]])
    answer = client.post("/upload?ranks=2&micro_batches=4", content=body).json()
    assert answer["problem"] == ""
    assert answer["inputs"]["forward"] == "500ms,500ms"
    assert parse_state(answer["query"]).forward == (0.5, 0.5)
