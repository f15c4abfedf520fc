// Selecting runs in the table, to compare, stop or archive them together. A selection survives updates of the table.
import { confirmed } from "./actions.js";
import { ask } from "./ask.js";
import { toast } from "./toasts.js";

const MOST_COMPARED = 8;
const bar = document.querySelector("#selection");
const chosen = new Set();
const picks = () => [...document.querySelectorAll("[data-pick]")];
const DONE = { stop: "asked to stop", archive: "archived" };

function show() {
  for (const pick of picks()) pick.checked = chosen.has(pick.value);
  const all = document.querySelector("[data-pick-all]");
  if (all) {
    const here = picks();
    const count = here.filter((pick) => pick.checked).length;
    all.checked = count > 0 && count === here.length;
    all.indeterminate = count > 0 && count < here.length;
  }
  bar.hidden = chosen.size === 0;
  const text = chosen.size === 1 ? "1 run selected" : `${chosen.size} runs selected`;
  bar.querySelector("[data-chosen]").textContent = chosen.size > MOST_COMPARED ? `${text}: at most ${MOST_COMPARED} can be compared` : text;
  bar.querySelector("[data-compare]").disabled = chosen.size < 2 || chosen.size > MOST_COMPARED;
}

async function all(button) {
  if (!(await confirmed(button.dataset.confirm, button.textContent.trim()))) return;
  const action = button.dataset.bulk;
  const failed = [];
  let done = 0;
  button.disabled = true;
  for (const uid of [...chosen]) {
    try {
      await ask(`/api/v1/runs/${uid}/${action}`, { method: "POST", body: {} });
      chosen.delete(uid);
      done += 1;
    } catch (error) {
      if (!("status" in error)) throw error;
      const name = document.querySelector(`#pick-${uid}`)?.getAttribute("aria-label").replace(/^Choose /, "") ?? uid;
      failed.push(`${name}: ${error.message}`);
      if (error.away) break;
    }
  }
  button.disabled = false;
  if (done > 0) toast(`${done === 1 ? "1 run is" : `${done} runs are`} ${DONE[action]}`);
  for (const line of failed) toast(line, true);
  show();
  document.dispatchEvent(new CustomEvent("rhyme:stale"));
}

document.addEventListener("change", ({ target }) => {
  if (target.matches("[data-pick-all]")) {
    for (const pick of picks()) {
      if (target.checked) chosen.add(pick.value);
      else chosen.delete(pick.value);
    }
  } else if (target.matches("[data-pick]")) {
    if (target.checked) chosen.add(target.value);
    else chosen.delete(target.value);
  } else return;
  show();
});
document.addEventListener("rhyme:replaced", show);
// Includes selected runs that are no longer on this page of the table.
bar.addEventListener("submit", (event) => {
  event.preventDefault();
  location.assign(`/compare?${[...chosen].map((uid) => `run=${uid}`).join("&")}`);
});
bar.addEventListener("click", (event) => {
  const bulk = event.target.closest("[data-bulk]");
  if (bulk) void all(bulk);
  if (event.target.closest("[data-choose-none]")) {
    chosen.clear();
    show();
    document.querySelector("[data-pick-all]")?.focus();
  }
});
// A browser that goes back to this page keeps the checked boxes, so they count.
for (const pick of picks()) if (pick.checked) chosen.add(pick.value);
show();
