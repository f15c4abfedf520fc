// Signs in with the code of a link or with a token, from the address's fragment, which browsers do not send, or from the
// form; or with an OpenID Connect provider, which sends the browser back with its answer in the address.
import { ask } from "./ask.js";

const form = document.querySelector("[data-sign-in]");
const provider = document.querySelector("[data-provider]");
// Where to go after signing in with the provider: the address that it sends the browser to is always the same.
const NEXT = "rhyme-next";
const goTo = (address) => location.replace(address);

function show(where, error) {
  if (!("status" in error)) throw error;
  where.textContent = error.message;
  where.hidden = false;
}

async function signIn(token) {
  const problem = document.querySelector("[data-problem]");
  problem.hidden = true;
  try {
    await ask("/api/v1/session", { method: "POST", body: { token } });
    goTo(form.dataset.next);
    return true;
  } catch (error) {
    show(problem, error);
    form.elements.token.focus();
    return false;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  // The reader may also paste a whole link.
  void signIn(form.elements.token.value.trim().replace(/^.*#(?:code|token)=/, ""));
});

async function withProvider(work) {
  const problem = document.querySelector("[data-provider-problem]");
  problem.hidden = true;
  provider.disabled = true;
  try {
    await work();
    return true;
  } catch (error) {
    provider.disabled = false;
    show(problem, error);
    return false;
  }
}

async function goToProvider() {
  sessionStorage.setItem(NEXT, form.dataset.next);
  const response = await ask("/api/v1/session/openid/begin", { method: "POST" });
  location.assign((await response.json()).address);
}

async function takeAnswer(answer) {
  const body = Object.fromEntries(["state", "code", "error"].map((name) => [name, answer.get(name) ?? ""]));
  await ask("/api/v1/session/openid", { method: "POST", body });
  const following = sessionStorage.getItem(NEXT) ?? "/";
  sessionStorage.removeItem(NEXT);
  goTo(following);
}

provider?.addEventListener("click", () => void withProvider(goToProvider));
// A browser that comes back to this page from its history shows it as it was left.
if (provider) addEventListener("pageshow", () => (provider.disabled = false));

const given = new URLSearchParams(location.search);
const fragment = new URLSearchParams(location.hash.slice(1));
const secret = fragment.get("code") ?? fragment.get("token");
const answered = provider !== null && given.has("state");
// Remove codes from the address and the history first.
if (answered) history.replaceState(null, "", location.pathname);
else if (secret) history.replaceState(null, "", location.pathname + location.search);
const done = answered ? await withProvider(() => takeAnswer(given)) : secret !== null && (await signIn(secret));
if (!done && !answered) {
  // The reader may be signed in already, although the link is used up: a request from another site comes without the
  // cookie, which only our own pages send.
  const response = await fetch("/api/v1/session");
  if (response.ok) goTo(form.dataset.next);
}
