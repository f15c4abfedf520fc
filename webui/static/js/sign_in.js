// Signs in with the token in the address's fragment (which browsers do not send), or with the one typed.
import { ask } from "./ask.js";

const form = document.querySelector("[data-sign-in]");
const problem = document.querySelector("[data-problem]");
const next = () => location.replace(form.dataset.next);

async function signIn(token) {
  problem.hidden = true;
  try {
    await ask("/api/v1/session", { method: "POST", body: { token } });
    next();
  } catch (error) {
    if (!("status" in error)) throw error;
    problem.textContent = error.message;
    problem.hidden = false;
    form.elements.token.focus();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  void signIn(form.elements.token.value.trim());
});

const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) {
  // Out of the address and the history before anything else.
  history.replaceState(null, "", location.pathname + location.search);
  void signIn(token);
} else {
  // Signed in already: a link from another site comes without the cookie, which is for our own pages only.
  const response = await fetch("/api/v1/session");
  if (response.ok) next();
}
