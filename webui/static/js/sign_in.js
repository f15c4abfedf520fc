// Signs in with the code of a link or with a token. Both come from the address's fragment, which browsers do not send,
// or from the form.
import { ask } from "./ask.js";

const form = document.querySelector("[data-sign-in]");
const problem = document.querySelector("[data-problem]");
const next = () => location.replace(form.dataset.next);

async function signIn(token) {
  problem.hidden = true;
  try {
    await ask("/api/v1/session", { method: "POST", body: { token } });
    next();
    return true;
  } catch (error) {
    if (!("status" in error)) throw error;
    problem.textContent = error.message;
    problem.hidden = false;
    form.elements.token.focus();
    return false;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  // The reader may also paste a whole link.
  void signIn(form.elements.token.value.trim().replace(/^.*#(?:code|token)=/, ""));
});

const fragment = new URLSearchParams(location.hash.slice(1));
const secret = fragment.get("code") ?? fragment.get("token");
// Remove the code from the address and the history first.
if (secret) history.replaceState(null, "", location.pathname + location.search);
if (!secret || !(await signIn(secret))) {
  // The reader may be signed in already, although the link is used up: a request from another site comes without the
  // cookie, which only our own pages send.
  const response = await fetch("/api/v1/session");
  if (response.ok) next();
}
