// Buttons and forms that call the API:
//   data-action="POST /api/v1/runs/x/stop"   the call; a form sends its fields as a JSON object
//   data-confirm="..."                        the question to confirm first
//   data-done="..."                           the message shown afterwards
//   data-then="/runs/{uid}"                   the next page; {name} is taken from the response
//   data-based-on="tag"                       the entity tag of what a form shows: a later edit is not overwritten
// Without data-then, the page's pieces are reloaded.
import { ask } from "./ask.js";
import { toast } from "./toasts.js";

export function start() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    if (button) void perform(button, null);
    const copying = event.target.closest("[data-copy]");
    if (copying) void copy(copying);
  });
  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-action]");
    if (!form) return;
    event.preventDefault();
    void perform(form, fields(form));
  });
  // Filters are part of the address: empty ones only make it longer.
  document.addEventListener("formdata", (event) => {
    if (event.target.getAttribute("method") !== "get") return;
    for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
  });
  document.addEventListener("change", (event) => {
    const form = event.target.closest("form[data-autosubmit]");
    if (form) form.requestSubmit();
  });
}

async function perform(element, body) {
  if (element.dataset.confirm && !(await confirmed(element.dataset.confirm, element.textContent.trim()))) return;
  const [method, url] = element.dataset.action.split(" ");
  const buttons = element.matches("form") ? element.querySelectorAll("button") : [element];
  for (const button of buttons) button.disabled = true;
  try {
    // A call without fields sends an empty object, because the API expects an object.
    const basedOn = element.dataset.basedOn;
    const headers = basedOn === undefined ? {} : { "If-Match": basedOn };
    const response = await ask(url, { method, headers, body: method === "DELETE" ? null : (body ?? {}) });
    if (basedOn !== undefined) element.dataset.basedOn = response.headers.get("ETag") ?? "*";
    const answer = response.status === 204 ? {} : await response.json();
    if (element.dataset.done) toast(element.dataset.done);
    if (element.dataset.then) location.assign(filled(element.dataset.then, answer));
    else document.dispatchEvent(new CustomEvent("rhyme:stale"));
  } catch (error) {
    if (!("status" in error)) throw error;
    toast(error.message, true);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

function filled(address, answer) {
  return address.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(answer[name] ?? ""));
}

function fields(form) {
  const body = {};
  for (const [name, value] of new FormData(form)) {
    body[name] = form.elements[name].dataset?.words === undefined ? value : words(value);
  }
  return body;
}

// A field with data-words holds words separated by commas; the API takes a list.
function words(text) {
  return [...new Set(text.split(",").map((word) => word.trim()).filter((word) => word !== ""))];
}

export function confirmed(question, title) {
  const dialog = document.querySelector("[data-confirm-dialog]");
  dialog.querySelector("[data-confirm-text]").textContent = question;
  dialog.querySelector("[data-confirm-yes]").textContent = title || "Confirm";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    toast("Copied");
  } catch {
    toast("The browser does not allow copying: select the text and copy it", true);
  }
}
