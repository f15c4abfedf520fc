// Creates a token and shows it once.
import { ask } from "./ask.js";

const form = document.querySelector("[data-new-token]");
const problem = document.querySelector("[data-token-problem]");
const issued = document.querySelector("[data-issued]");

async function make() {
  problem.hidden = true;
  const body = { name: form.elements.name.value.trim(), role: form.elements.role.value };
  const days = Number(form.elements.days.value);
  if (days) body.days = days;
  const button = form.querySelector("button");
  button.disabled = true;
  try {
    const response = await ask("/api/v1/tokens", { method: "POST", body });
    const { name, role, token } = await response.json();
    issued.querySelector("[data-issued-name]").textContent = `The ${role}'s token “${name}”.`;
    issued.querySelector("[data-issued-token]").textContent = token;
    issued.querySelector("[data-issued-copy]").dataset.copy = token;
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

form?.addEventListener("submit", (event) => {
  event.preventDefault();
  void make();
});
