// Requests to the service. Every failure is an AskError with a sentence for the reader; `away`: no response.

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
// The service responds in milliseconds, so a response that takes this long will not arrive.
const LIMIT_MS = 30_000;
const SESSION = "/api/v1/session";
// While the reader signs out, refused requests in the background do not redirect the page.
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
    throw new AskError("The server does not respond.", 0);
  }
  if (response.ok) return response;
  if (endsSession) signingOut = false;
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // A response from elsewhere (a proxy's page): only its status is known.
  }
  if (response.status === 401 && csrf()) signedOut();
  throw new AskError(sentence(problem, response.status), response.status, problem.errors);
}

function sentence(problem, status) {
  const said = problem.detail || problem.title || `The server responded with status ${status}`;
  const text = `${said[0].toUpperCase()}${said.slice(1)}`;
  const fields = (problem.errors ?? []).map((one) => `${one.field.replace(/^body\./, "")}: ${one.message}`);
  return fields.length ? `${text}. ${fields.join("; ")}` : text;
}

export function signedOut() {
  if (signingOut) return;
  const next = location.pathname + location.search;
  location.assign(`/sign-in?next=${encodeURIComponent(next)}`);
}
