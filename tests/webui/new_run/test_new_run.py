"""The form of a new run: filled, judged, started."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from rhyme_openrlhf import drafting_core, embedded
from rhyme_openrlhf.drafting import acceptance, budget, planner
from rhyme_openrlhf.latency.profile import Subject, folder, write
from rhyme_openrlhf.run.model_shape import read_shape
from rhyme_openrlhf.webui.new_run.templates import templates
from tests import nvml
from tests.history.archives import archive, record
from tests.latency import formula

COMMAND = (
    "rhyme demo --run.name pasted --histospec.window_max 8 --no-histospec.own_output --actor.eps_clip_low_high 0.1 0.3"
)


def faults(text: str) -> set[str]:
    return set(re.findall(r'data-fault="([^"]*)"', text))


def test_the_demo_is_ready_to_start(launching_dashboard: Any) -> None:
    page = launching_dashboard.signed_in().get("/runs/new").text
    assert "<h2>Ready</h2>" in page and faults(page) == set()
    assert "rhyme train --run.name demo" in page and "3 GPUs" in page
    assert len(set(re.findall(r'data-key="([^"]*)"', page))) == len(re.findall(r'data-key="([^"]*)"', page))


def test_every_fault_is_named_with_its_field(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    given = {"vllm": {"num_engines": "many"}, "histospec": {"window_max": 999}, "no": {"such": 1}}
    panel = client.post("/ui/new-run/panel", json={"name": "a b", "arguments": given}).text
    assert faults(panel) == {"name", "vllm.num_engines", "histospec.window_max", ""}
    assert "must be a whole number from 1 to 128" in panel


def test_a_command_fills_the_form(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    form = html.unescape(client.post("/ui/new-run/form", json={"command": f"{COMMAND} --logger.wandb.key secret"}).text)
    assert re.search(r'id="f-histospec.window_max"[^>]*value="8"', form)
    assert re.search(r'id="f-actor.eps_clip_low_high"[^>]*value="0.1 0.3"', form)
    assert re.search(r'id="f-name"[^>]*value="pasted"', form)
    assert "--logger.wandb.key" in form and "secret" not in form
    old = client.post("/ui/new-run/form", json={"command": f"{COMMAND} --history.nice 5"}).text
    assert "--history.nice is ignored: leave it out" in old
    refused = client.post("/ui/new-run/form", json={"command": "rhyme demo --nonsense 3"})
    assert refused.status_code == 422 and "--nonsense" in refused.json()["errors"][0]["message"]


def test_a_clone_has_the_runs_settings_but_its_own_checkpoints(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    root = launching_dashboard.app.state.launching.roots[0]
    body = {"command": COMMAND, "experiment": "ablation", "arguments": {"ckpt": {"path": str(root / "mine")}}}
    uid = client.post("/api/v1/runs", json=body).json()["uid"]
    page = html.unescape(client.get("/runs/new", params={"clone": uid}).text)
    assert re.search(r'id="f-histospec.window_max"[^>]*value="8"', page) and 'value="ablation"' in page
    assert re.search(r'<input[^>]*value="[^"]*-clone"', page)
    assert "folder of its own" in page and str(root / "mine") not in page
    # What the form's script sends back to its default has to be known to it.
    assert "ckpt.path" in re.findall(r'data-base="([^"]*)"', page)[0].split()
    assert f'href="/runs/new?clone={uid}"' in client.get(f"/runs/{uid}").text


def test_memory_is_planned_and_the_gain_simulated_where_a_profile_is_known(
    launching_dashboard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    client = launching_dashboard.signed_in()
    page = client.get("/runs/new").text
    assert "1.0M parameters" in page and "KV cache of one sample at full length" in page
    for part in ("Each GPU: policy", "weights", "gradients", "optimizer", "rows of the sampler", "/dev/shm"):
        assert f"<dt>{part}" in page
    given = {"arguments": templates(launching_dashboard.app.state.launching.roots)["demo"].arguments}
    assert "No profile of this model" in client.post("/ui/new-run/estimate", json=given).text
    shape = read_shape(str(embedded.MODEL))
    assert shape is not None
    folder().mkdir(parents=True)
    (folder() / "broken.json").write_text("{")
    profile = formula.profile(subject=Subject(shape.name, "a machine of a test", "float32", 1))
    write(profile, folder() / "mine.json")
    found = html.unescape(client.post("/ui/new-run/estimate", json=given).text)
    assert "Simulated, not measured" in found and "a machine of a test, float32 (measured)" in found
    assert "Response lengths" in found and "assumed: half up to" in found
    cloned = client.post("/ui/new-run/estimate", json={**given, "clone": launching_dashboard.run_uid}).text
    assert "from the run demo" in cloned
    off = {**given["arguments"], "histospec": {"enable": False}}
    assert "switched off" in client.post("/ui/new-run/estimate", json={"arguments": off}).text
    wrong = {"vllm": {"num_engines": "many"}}
    assert client.post("/ui/new-run/estimate", json={"arguments": wrong}).status_code == 422
    elsewhere = {**given["arguments"], "latency": {"profile": "/etc/passwd"}}
    assert "must be below" in client.post("/ui/new-run/estimate", json={"arguments": elsewhere}).text
    assert launching_dashboard.signed_in("viewer").post("/ui/new-run/estimate", json=given).status_code == 403


def test_earlier_runs_with_the_same_prompts_are_offered(launching_dashboard: Any) -> None:
    client, launching = launching_dashboard.signed_in(), launching_dashboard.app.state.launching
    arguments = templates(launching.roots)["demo"].arguments

    def estimated(**changes: Any) -> str:
        given = {**arguments, **{group: {**arguments.get(group, {}), **of} for group, of in changes.items()}}
        return html.unescape(client.post("/ui/new-run/estimate", json={"arguments": given}).text)

    assert "No run of this service has left responses" in estimated()
    uid = client.post("/api/v1/runs", json={"name": "first", "arguments": arguments}).json()["uid"]
    archive(launching.runs_directory / uid / "attempt-1" / "history" / "archive", record("a" * 32, 1, [1]))
    shown = estimated()
    assert f'<a href="/runs/{uid}">first</a>' in shown and "drafts from the newest ones by itself" in shown
    assert json.loads(re.findall(r'data-apply="(\{.*?\})" aria-label="Draft from first', shown)[0]) == {
        "history.earlier": uid
    }
    assert "The run drafts from first alone." in estimated(history={"earlier": uid})
    assert "--history.earlier is none" in estimated(history={"earlier": "none"})
    assert "none in a reproducible run" in estimated(run={"reproducible": True})
    assert "Earlier runs" not in estimated(histospec={"enable": False})
    # The command for a shell has the run's directory.
    given = {"name": "second", "arguments": {**arguments, "history": {"earlier": uid}}}
    assert str(launching.runs_directory / uid) in client.post("/ui/new-run/panel", json=given).text


def test_without_the_compiled_core_the_gain_is_refused_in_a_sentence(
    launching_dashboard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    missing = drafting_core._Missing("drafts from history", ImportError("not built"))
    for module in (acceptance, budget, planner):
        monkeypatch.setattr(module, "core", missing)
    given = {"arguments": templates(launching_dashboard.app.state.launching.roots)["demo"].arguments}
    shape = read_shape(str(embedded.MODEL))
    assert shape is not None
    folder().mkdir(parents=True)
    write(formula.profile(subject=Subject(shape.name, "a machine", "float32", 1)), folder() / "mine.json")
    answer = launching_dashboard.signed_in().post("/ui/new-run/estimate", json=given)
    assert answer.status_code == 200
    assert "It cannot be simulated: drafts from history need the compiled core" in html.unescape(answer.text)


def test_a_plan_that_does_not_fit_the_gpus_here_names_the_flag(
    launching_dashboard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.install(monkeypatch, tmp_path, gpus=2, memory=12 * 2**20)
    client = launching_dashboard.signed_in()
    given = templates(launching_dashboard.app.state.launching.roots)["demo"].arguments
    arguments = {**given, "ds": {**given.get("ds", {}), "zero_stage": 1}}
    panel = html.unescape(client.post("/ui/new-run/panel", json={"name": "small", "arguments": arguments}).text)
    assert (
        "<dt>memory of the GPUs here</dt><dd>12.0 MiB</dd>" in panel and "A GPU of the policy needs at least" in panel
    )
    assert "--ds.adam_offload" in panel


def test_a_run_is_pasted_corrected_and_started_once(launching_dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(launching_dashboard.link())
    expect(page).to_have_url(f"{launching_dashboard.url}/")
    page.goto(f"{launching_dashboard.url}/runs/new")
    page.get_by_text("Paste a command").click()
    page.locator("#pasted").fill(COMMAND)
    page.get_by_role("button", name="Fill the form").click()
    expect(page.locator("[id='f-histospec.window_max']")).to_have_value("8")
    expect(page.locator("#f-name")).to_be_focused()

    engines = page.locator("[id='f-vllm.num_engines']")
    engines.fill("many")
    problem = page.locator("[id='e-vllm.num_engines']")
    expect(problem).to_have_text("must be a whole number at least 1")
    expect(engines).to_have_attribute("aria-invalid", "true")
    start = page.get_by_role("button", name="Start run")
    expect(start).to_be_disabled()
    engines.fill("3")
    expect(problem).to_be_hidden()
    expect(page.locator("[data-command]")).to_contain_text("--vllm.num_engines=3")
    expect(page.locator("[data-command]")).to_contain_text("--no-histospec.own_output")

    page.get_by_role("searchbox", name="Search all options").fill("gradient check")
    expect(page.locator("[id='f-actor.gradient_checkpointing_enable']")).to_be_visible()
    expect(engines).to_be_hidden()
    page.get_by_role("searchbox", name="Search all options").fill("")

    start.dblclick()
    expect(page).to_have_url(re.compile(r"/runs/[0-9a-f]{16}$"))
    uid = page.url.rpartition("/")[2]
    client = launching_dashboard.signed_in()
    run = client.get(f"/api/v1/runs/{uid}").json()
    assert run["spec"]["arguments"]["vllm"]["num_engines"] == 3 and run["name"] == "pasted"
    assert run["spec"]["arguments"]["actor"]["eps_clip_low_high"] == [0.1, 0.3]
    assert len(client.get("/api/v1/runs", params={"origin": "launched"}).json()["items"]) == 1

    page.get_by_role("link", name="Clone").click()
    expect(page.locator("[id='f-vllm.num_engines']")).to_have_value("3")
    page.locator("[id='f-histospec.window_max']").evaluate("input => { input.closest('details').open = true; }")
    page.locator("[id='f-histospec.window_max']").fill("")
    page.get_by_role("button", name="Start run").click()
    expect(page).to_have_url(re.compile(r"/runs/(?!new)[0-9a-f]{16}$"))
    clone = client.get(f"/api/v1/runs/{page.url.rpartition('/')[2]}").json()
    assert clone["parent"] == uid and clone["spec"]["arguments"]["vllm"]["num_engines"] == 3
    assert clone["spec"]["arguments"]["histospec"] == {"own_output": False}


def test_a_sweep_is_checked_as_a_whole(launching_dashboard: Any) -> None:
    client = launching_dashboard.signed_in()
    arguments = templates(launching_dashboard.app.state.launching.roots)["demo"].arguments
    form = {"name": "lr", "arguments": arguments, "options": {"actor.adam.lr": "1e-6, 3e-6", "train.seed": "1,2,3"}}
    panel = html.unescape(client.post("/ui/new-run/panel", json=form).text)
    assert '<h2 data-runs="6">Ready: 6 runs</h2>' in panel
    vary = "--vary 'actor.adam.lr=1e-6, 3e-6' --vary train.seed=1,2,3"
    assert f"rhyme runs sweep --name lr {vary} -- rhyme train" in panel
    # What differs is not among what the runs have in common.
    assert "--actor.adam.lr=" not in panel.partition("-- rhyme train")[2].partition("</code>")[0]
    drawn = {**form, "options": {"actor.adam.lr": "log:1e-7..1e-5"}, "count": 4, "seed": 2}
    assert "--count 4 --seed 2 --" in client.post("/ui/new-run/panel", json=drawn).text
    wrong = {**form, "options": {"actor.adam.lr": "1e-6, x", "train.sed": "1"}}
    panel = html.unescape(client.post("/ui/new-run/panel", json=wrong).text)
    assert faults(panel) == {"options"} and "each value must be a number" in panel and "train.seed" in panel
    assert faults(client.post("/ui/new-run/panel", json={**drawn, "count": None}).text) == {"options"}
    # The number of engines is in each run, and nowhere else; estimates are of the first run.
    engines = {"arguments": {**arguments, "vllm": {}}, "options": {"vllm.num_engines": "1,2"}}
    assert client.post("/ui/new-run/estimate", json=engines).status_code == 200
    assert client.post("/ui/new-run/estimate", json={**engines, "options": {}}).status_code == 422
    few = {**drawn, "options": {"train.seed": "1,2"}}
    assert faults(client.post("/ui/new-run/panel", json=few).text) == {"count"}


def test_a_sweep_is_started_from_the_form(launching_dashboard: Any, browser_page: Any) -> None:
    page = browser_page
    page.goto(launching_dashboard.link(path="/runs/new"))
    page.locator("#s-sweep > summary").click()
    page.get_by_label("Options that differ").fill("actor.adam.lr = 1e-6, x\ntrain.seed = 1")
    expect(page.locator("#e-options")).to_have_text("--actor.adam.lr: each value must be a number")
    page.get_by_label("Options that differ").fill("actor.adam.lr = 1e-6, 3e-6\ntrain.seed = 1\ntrain.seed = 2")
    expect(page.locator("#e-options")).to_be_hidden()
    expect(page.get_by_label("Experiment", exact=True)).to_be_disabled()
    page.get_by_label("Name", exact=True).fill("lr")
    page.get_by_role("button", name="Start 4 runs").dblclick()
    expect(page).to_have_url(re.compile(r"/experiments/\d+$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("lr")
    expect(page.locator("#groups").get_by_role("row").filter(has_text="2 queued")).to_have_count(2)
    runs = launching_dashboard.signed_in().get("/api/v1/runs", params={"experiment": "lr"}).json()["items"]
    assert sorted(run["name"] for run in runs) == ["lr-1", "lr-2", "lr-3", "lr-4"]


def test_expert_options_are_folded_away_until_they_are_changed_or_searched(
    launching_dashboard: Any, browser_page: Any
) -> None:
    page = browser_page
    page.goto(launching_dashboard.link(path="/runs/new"))
    common, expert = page.locator("[id='f-history.workers']"), page.locator("[id='f-history.rollouts']")
    page.locator("#s-histospec-enable > summary").click()
    expect(common).to_be_visible()
    expect(expert).to_be_hidden()
    page.get_by_role("searchbox", name="Search all options").fill("history.rollouts")
    expect(expert).to_be_visible()
    page.get_by_role("searchbox", name="Search all options").fill("")
    expect(expert).to_be_hidden()
    page.get_by_text("Paste a command").click()
    page.locator("#pasted").fill("rhyme demo --history.rollouts 3")
    page.get_by_role("button", name="Fill the form").click()
    expect(expert).to_have_value("3")
    expect(expert).to_be_visible()
    expect(page.locator("[id='f-history.fetch_timeout_s']")).to_be_visible()
    expect(page.locator("[id='f-move.carrier']")).to_be_hidden()


# What lies over something else within a visible field: label, input and help below each other do not.
OVERLAPS = """
() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const found = [];
  const fields = [...document.querySelectorAll(".field")].filter((one) => one.getClientRects().length);
  for (const field of fields) {
    const names = ".field-head, input:not([type=checkbox]), select, textarea, .help, .problem";
    const parts = [...field.querySelectorAll(names)]
      .concat([...field.children].filter((one) => one.matches("label")))
      .map((one) => one.getBoundingClientRect()).filter((box) => box.height > 0)
      .sort((one, other) => one.top - other.top);
    if (parts.some((box, index) => index > 0 && box.top < parts[index - 1].bottom - 1)) {
      found.push(field.querySelector("input, select, textarea").id);
    }
  }
  return [fields.length, found];
}
"""


@pytest.mark.parametrize("width", [1440, 390])
def test_no_help_lies_over_its_field(launching_dashboard: Any, browser_page: Any, width: int) -> None:
    page = browser_page
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(launching_dashboard.link(path="/runs/new"))
    expect(page.get_by_label("Experiment", exact=True)).to_be_visible()
    fields, overlapping = page.evaluate(OVERLAPS)
    assert fields > 50 and overlapping == []
