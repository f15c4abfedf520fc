// The form of a new run: options that are not at their default go to the server, which returns errors and the plan.
//   [data-field]   one option; data-kind, data-type and data-list define how its text becomes a value
// An empty field leaves its option at the default; the server checks everything else.
import { ask } from "./ask.js";
import { fold } from "./option_search.js";

const form = document.querySelector("[data-new-run]");
const holder = form.querySelector("[data-form]");
const panel = document.querySelector("[data-panel]");
const start = document.querySelector("[data-start]");
const startProblem = document.querySelector("[data-start-problem]");
// Delay of the check: long enough to type a word, short enough to feel immediate.
const PAUSE_MS = 250;

let timer = null;
let asked = 0;
let sent = { body: "", count: 0 };

const fields = () => [...form.querySelectorAll("[data-field]")];
const one = (name) => form.querySelector(`[data-${name}]`);

function typed(text, type) {
  if (type === "str") return text;
  const number = Number(text);
  // Text that is no number is sent as it is, and the server explains the error.
  return text.trim() !== "" && Number.isFinite(number) ? number : text;
}

// The field's value, or undefined for the default.
function valueOf(field) {
  const input = field.querySelector("[data-input]");
  const { kind, type } = field.dataset;
  if (kind === "switch") {
    const word = input.checked ? "on" : "off";
    return word === field.dataset.default ? undefined : JSON.parse(field.dataset[word]);
  }
  const text = kind === "block" || type === "str" ? input.value : input.value.trim();
  if (text.trim() === "") return undefined;
  if ("list" in field.dataset) return text.trim().split(/[\s,]+/).map((item) => typed(item, type));
  return typed(text, type);
}

function collect() {
  const found = {};
  for (const field of fields()) {
    const value = valueOf(field);
    if (value === undefined) continue;
    (found[field.dataset.group] ??= {})[field.dataset.option] = value;
  }
  return found;
}

// The values of each option of the sweep, as the server reads them; null without options. Lines of one option add up.
function sweep() {
  const options = {};
  for (const line of one("sweep-options").value.split("\n")) {
    if (line.trim() === "") continue;
    const [name, ...values] = line.split("=");
    const before = options[name.trim()];
    options[name.trim()] = (before ? `${before},` : "") + values.join("=").trim();
  }
  if (Object.keys(options).length === 0) return null;
  const count = one("sweep-count").value;
  return { options, count: count === "" ? null : Number(count), seed: Number(one("sweep-seed").value) };
}

const nameOf = () => one("name").value.trim();

function markChanges() {
  for (const field of fields()) {
    const changed = valueOf(field) !== undefined;
    field.classList.toggle("changed", changed);
    const reset = field.querySelector("[data-reset]");
    if (reset) reset.hidden = !changed;
  }
  for (const details of form.querySelectorAll("[data-fold]")) {
    const count = details.querySelectorAll(".field.changed").length;
    const mark = details.querySelector("[data-changed-count]");
    mark.hidden = count === 0;
    mark.textContent = `${count} changed`;
  }
  one("sweep-mark").hidden = sweep() === null;
  const experiment = one("experiment");
  experiment.disabled = sweep() !== null;
  experiment.placeholder = experiment.disabled ? "called as the runs" : "";
}

function edited() {
  markChanges();
  clearTimeout(timer);
  timer = setTimeout(() => void check(), PAUSE_MS);
}

async function check() {
  asked += 1;
  const mine = asked;
  const last = panel.querySelector("[data-estimates]");
  const given = { arguments: collect(), ...sweep() };
  let html;
  try {
    const { template, clone } = one("filled").dataset;
    const from = clone ? { clone } : { template };
    const response = await ask("/ui/new-run/panel", { method: "POST", body: { name: nameOf(), ...given, ...from } });
    html = await response.text();
  } catch (error) {
    if (!("status" in error)) throw error;
    if (mine === asked) say(error.message);
    return;
  }
  // The form changed meanwhile: a newer response will arrive.
  if (mine !== asked) return;
  say("");
  replace(panel, html);
  showFaults();
  markDifferences();
  await estimate(mine, last, given);
}

// Marks the fields that differ from the template or the cloned run, as the panel lists them.
function markDifferences() {
  for (const field of form.querySelectorAll(".differs")) field.classList.remove("differs");
  for (const item of panel.querySelectorAll("[data-differs]")) {
    form.querySelector(`[data-field][data-key="${CSS.escape(item.dataset.differs)}"]`)?.classList.add("differs");
  }
}

// Asks for the estimates of the form as it was checked. The last ones stay, greyed, until the new ones are there.
async function estimate(mine, last, given) {
  const place = panel.querySelector("[data-estimates]");
  if (!place) return;
  if (last) {
    place.replaceChildren(...last.childNodes);
    place.classList.add("out-of-date");
  }
  const { clone } = one("filled").dataset;
  try {
    const body = { ...given, ...(clone ? { clone } : {}) };
    const response = await ask("/ui/new-run/estimate", { method: "POST", body });
    const html = await response.text();
    // The form changed meanwhile: newer estimates will arrive.
    if (mine !== asked) return;
    replace(place, html);
    place.classList.remove("out-of-date");
  } catch (error) {
    if (!("status" in error)) throw error;
    if (mine === asked) place.replaceChildren(Object.assign(document.createElement("p"), { className: "soft small-text", textContent: `No estimates: ${error.message}` }));
  }
}

// Sets the fields that a proposal changes, as if the user had.
function applyChange(values) {
  for (const [key, value] of Object.entries(values)) {
    const field = form.querySelector(`[data-field][data-key="${CSS.escape(key)}"]`);
    const input = field.querySelector("[data-input]");
    if (field.dataset.kind === "switch") input.checked = JSON.stringify(value) === field.dataset.on;
    else input.value = String(value);
  }
  edited();
}

// Rendered by the server, and escaped by its templates.
function replace(element, html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  element.replaceChildren(template.content);
}

function say(text) {
  startProblem.textContent = text;
  startProblem.hidden = text === "";
}

// Shows each of the panel's errors at its field, too.
function showFaults() {
  const faults = new Map();
  for (const item of panel.querySelectorAll("[data-fault]")) {
    const { fault } = item.dataset;
    if (!fault) continue;
    // Only the field of a sweep's options may have several errors.
    const message = fault === "options" ? item.textContent.trim().replace(/\s+/, ": ") : item.querySelector("[data-message]").textContent;
    faults.set(fault, faults.has(fault) ? `${faults.get(fault)}; ${message}` : message);
  }
  mark(faults);
  // For screen readers: only this text is read aloud when it changes, not the whole panel.
  const verdict = document.querySelector("[data-verdict]");
  const words = panel.querySelector("h2").textContent;
  if (verdict.textContent !== words) verdict.textContent = words;
  if (!start) return;
  start.disabled = panel.querySelector("[data-fault]") !== null;
  const runs = panel.querySelector("[data-runs]")?.dataset.runs;
  start.textContent = runs ? `Start ${runs} runs` : "Start run";
}

function mark(faults) {
  for (const field of form.querySelectorAll("[data-key]:not(form)")) {
    const message = faults.get(field.dataset.key) ?? "";
    const problem = field.querySelector("[data-problem]");
    problem.textContent = message;
    problem.hidden = message === "";
    const input = field.querySelector("input, select, textarea");
    if (message) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}

function request() {
  const words = one("tags").value.split(",").map((word) => word.trim()).filter((word) => word !== "");
  const about = { name: nameOf(), notes: one("notes").value, tags: [...new Set(words)] };
  const given = collect();
  const swept = sweep();
  if (swept) return { url: "/api/v1/sweeps", body: { ...about, arguments: given, ...swept } };
  const experiment = one("experiment").value.trim();
  if (experiment) about.experiment = experiment;
  const { clone, base } = one("filled").dataset;
  if (!clone) return { url: "/api/v1/runs", body: { ...about, arguments: given } };
  // Options that the cloned run set and this form does not are reset to their default.
  for (const key of base.split(" ").filter(Boolean)) {
    const at = key.indexOf(".");
    const group = (given[key.slice(0, at)] ??= {});
    if (!(key.slice(at + 1) in group)) group[key.slice(at + 1)] = null;
  }
  return { url: `/api/v1/runs/${clone}/clone`, body: { ...about, edits: given } };
}

async function submit() {
  const { url, body } = request();
  // The same request has the same key, so that a second click starts no second run; another request has another key.
  const text = JSON.stringify([url, body]);
  if (text !== sent.body) sent = { body: text, count: sent.count + 1 };
  start.disabled = true;
  say("");
  try {
    const headers = { "Idempotency-Key": `${form.dataset.key}-${sent.count}` };
    const response = await ask(url, { method: "POST", body, headers });
    const made = await response.json();
    location.assign(url === "/api/v1/sweeps" ? `/experiments/${made.experiment}` : `/runs/${made.uid}`);
  } catch (error) {
    if (!("status" in error)) throw error;
    const faults = new Map(error.errors.map(({ field, message }) => [field.replace(/^body\.(arguments\.|edits\.)?/, "").replace(/^options\..*/, "options"), message]));
    mark(faults);
    say(error.message);
    start.disabled = false;
  }
}

// A link to a field also opens the fold around it.
function reach(event) {
  const link = event.target.closest("a[href^='#f-']");
  if (!link) return;
  const input = document.getElementById(link.getAttribute("href").slice(1));
  if (!input) return;
  event.preventDefault();
  fold.showAll(form);
  for (let at = input.closest("details"); at; at = at.parentElement.closest("details")) at.open = true;
  input.scrollIntoView({ block: "center" });
  input.focus({ preventScroll: true });
}

async function fillFrom(command) {
  const problem = document.querySelector("[data-paste-problem]");
  problem.hidden = true;
  try {
    const response = await ask("/ui/new-run/form", { method: "POST", body: { command } });
    replace(holder, await response.text());
  } catch (error) {
    if (!("status" in error)) throw error;
    const lines = error.errors.length > 0 ? error.errors.map(({ field, message }) => `${field.replace(/^body\.(arguments\.)?/, "")}: ${message}`) : [error.message];
    problem.replaceChildren(...lines.map((line) => Object.assign(document.createElement("p"), { textContent: line })));
    problem.hidden = false;
    document.getElementById("pasted").focus();
    return;
  }
  for (const link of document.querySelectorAll(".choice[aria-current]")) link.removeAttribute("aria-current");
  document.getElementById("paste").open = false;
  begin();
  one("name").focus();
  await check();
}

function begin() {
  fold.start(form);
  markChanges();
}

form.addEventListener("input", (event) => {
  if (event.target.closest("[data-field], [data-key='name'], [data-sweep]")) edited();
});
form.addEventListener("click", (event) => {
  const reset = event.target.closest("[data-reset]");
  if (!reset) return;
  const input = reset.closest("[data-field]").querySelector("[data-input]");
  input.value = "";
  input.focus();
  edited();
});
form.addEventListener("keydown", (event) => {
  // Only the button starts a run, never Enter in a field.
  if (event.key === "Enter" && event.target.matches("input")) event.preventDefault();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (start && !start.disabled) void submit();
});
document.querySelector("[data-paste]").addEventListener("submit", (event) => {
  event.preventDefault();
  void fillFrom(document.getElementById("pasted").value);
});
panel.addEventListener("click", reach);
panel.addEventListener("click", (event) => {
  const button = event.target.closest("[data-apply]");
  if (button) applyChange(JSON.parse(button.dataset.apply));
});
begin();
showFaults();
void estimate(asked, null, { arguments: collect() });
// The cluster's free resources are loaded after the page, because Ray may be slow. The module that loads pieces starts
// after this one and does it.
document.addEventListener("DOMContentLoaded", () => document.dispatchEvent(new CustomEvent("rhyme:stale")));
