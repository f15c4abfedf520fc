// Forms that create something with a secret, which is shown once, or change it:
//   data-issue="/api/v1/tokens"   the address; empty fields are not sent
//   data-then="/webhooks"         the form changes what is there, and this is the next page
//   data-number                   on a field: its value is a number
//   data-list                     on checkboxes of one name: the chosen values are a list
import { ask } from "./ask.js";

const problem = document.querySelector("[data-issue-problem]");
const issued = document.querySelector("[data-issued]");

function fields(form) {
  const body = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if ("list" in field.dataset) {
      body[field.name] ??= [];
      if (field.checked) body[field.name].push(field.value);
    } else if (field.value.trim() !== "") {
      body[field.name] = "number" in field.dataset ? Number(field.value) : field.value.trim();
    }
  }
  return body;
}

async function make(form) {
  problem.hidden = true;
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    const following = form.dataset.then;
    const response = await ask(form.dataset.issue, { method: following ? "PATCH" : "POST", body: fields(form) });
    if (following) return location.assign(following);
    const { name, token, secret } = await response.json();
    issued.querySelector("[data-issued-name]").textContent = name;
    issued.querySelector("[data-issued-token]").textContent = token ?? secret;
    issued.querySelector("[data-issued-copy]").dataset.copy = token ?? secret;
    issued.hidden = false;
    issued.focus();
    form.reset();
    document.dispatchEvent(new CustomEvent("rhyme:stale"));
  } catch (error) {
    if (!("status" in error)) throw error;
    problem.textContent = error.message;
    problem.hidden = false;
    form.elements.name.focus();
  } finally {
    button.disabled = false;
  }
}

document.querySelector("[data-issue]")?.addEventListener("submit", (event) => {
  event.preventDefault();
  void make(event.target);
});
