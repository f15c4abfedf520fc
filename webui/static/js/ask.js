// Asking the service. Every failure is an Asked error with a sentence for the reader; `away`: nobody answered.

export class AskError extends Error {
  constructor(message, status, errors) {
    super(message);
    this.status = status;
    this.errors = errors ?? [];
  }

  get away() {
    return this.status === 0;
  }
}

const csrf = () => document.querySelector("meta[name=csrf]")?.content ?? "";
// The service answers pages in milliseconds; what takes this long does not come.
const LIMIT_MS = 30_000;
const SESSION = "/api/v1/session";
// The reader signs out: the page goes where the button says, also when requests in the background are refused meanwhile.
let signingOut = false;

export async function ask(url, { method = "GET", body = null, headers: more = {} } = {}) {
  const headers = { ...more };
  if (method !== "GET") headers["X-CSRF-Token"] = csrf();
  if (body !== null) headers["Content-Type"] = "application/json";
  const endsSession = method === "DELETE" && url === SESSION;
  signingOut ||= endsSession;
  let response;
  try {
    response = await fetch(url, {
      method,
      headers,
      body: body === null ? null : JSON.stringify(body),
      signal: AbortSignal.timeout(LIMIT_MS),
    });
  } catch {
    if (endsSession) signingOut = false;
    throw new AskError("The server does not answer.", 0);
  }
  if (response.ok) return response;
  if (endsSession) signingOut = false;
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // Not one of ours (a proxy's page): the status is all there is to say.
  }
  if (response.status === 401 && csrf()) signedOut();
  throw new AskError(sentence(problem, response.status), response.status, problem.errors);
}

function sentence(problem, status) {
  const said = problem.detail || problem.title || `The server answered ${status}`;
  const text = `${said[0].toUpperCase()}${said.slice(1)}`;
  const fields = (problem.errors ?? []).map((one) => `${one.field.replace(/^body\./, "")}: ${one.message}`);
  return fields.length ? `${text}. ${fields.join("; ")}` : text;
}

export function signedOut() {
  if (signingOut) return;
  const next = location.pathname + location.search;
  location.assign(`/sign-in?next=${encodeURIComponent(next)}`);
}
