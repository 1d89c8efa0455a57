"""GET /topologies/{name}.svg: the drawing, safe to open in a browser."""

import xml.etree.ElementTree as ET

from planner.topology.bundled import load_topology, topology_names
from planner.topology.drawing.cluster import draw_svg
from tests.api.conftest import Client


def test_every_bundled_topology_is_drawn(client: Client) -> None:
    for name in topology_names():
        answer = client.get(f"/topologies/{name}.svg")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml")
        assert ET.fromstring(answer.text).get("role") == "img"
        assert answer.text == draw_svg(load_topology(name))


def test_a_drawing_may_load_and_run_nothing(client: Client) -> None:
    headers = client.get("/topologies/dgx-h100.svg").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert "script-src" not in policy
    assert policy["style-src"] == "'unsafe-inline'"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_drawing_follows_the_number_of_nodes(client: Client) -> None:
    one = client.get("/topologies/dgx-h100.svg?nodes=1").text
    assert "8 GPUs" in one
    assert "4,096 nodes" in client.get("/topologies/dgx-h100.svg").text
    assert "more nodes" not in one


def test_an_unknown_name_and_a_bad_number_are_refused_in_words(client: Client) -> None:
    unknown = client.get("/topologies/dgx-h10.svg")
    assert unknown.status_code == 404
    assert "dgx-h100" in unknown.json()["error"]["message"]
    assert client.get("/topologies/dgx-h100.svg?nodes=5000").status_code == 422


def test_the_document_is_still_found_by_its_name(client: Client) -> None:
    assert client.get("/topologies/dgx-h100").json()["document"]["name"] == "dgx-h100"


def test_the_form_links_the_drawings(client: Client) -> None:
    page = client.get("/").text
    for name in topology_names():
        assert f'href="/topologies/{name}.svg"' in page
