// Signs in with the code of a link, or with a token, in the address's fragment (which browsers do not send), or with
// what was typed or pasted.
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
  // A whole link may be pasted too.
  void signIn(form.elements.token.value.trim().replace(/^.*#(?:code|token)=/, ""));
});

const fragment = new URLSearchParams(location.hash.slice(1));
const secret = fragment.get("code") ?? fragment.get("token");
// Out of the address and the history before anything else.
if (secret) history.replaceState(null, "", location.pathname + location.search);
if (!secret || !(await signIn(secret))) {
  // Signed in already, though the link was used before: a link from another site comes without the cookie, which is for
  // our own pages only.
  const response = await fetch("/api/v1/session");
  if (response.ok) next();
}
