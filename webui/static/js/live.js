// Live updates: one stream per page reports events, and the parts of the page that they concern are reloaded, at most
// once a second. A figure in view is reloaded after its pause (figures.js). A stale part stays stale until it is
// reloaded, so the last event is always shown.
//   <body data-live="/api/v1/...">   the stream
// A hidden or paused page loads nothing and catches up afterwards. If the server does not respond, the page says so and
// tries again with growing delays.
import { ask, signedOut } from "./ask.js";
import * as figures from "./figures.js";
import { keep, kept } from "./kept.js";
import * as pieces from "./pieces.js";

const REFRESH_MS = 1000;
const RETRY_MS = [1000, 2000, 5000, 10_000];
const TICK_MS = 1000;

const url = document.body.dataset.live;
const indicator = document.querySelector("[data-connection]");
const pause = document.querySelector("[data-pause]");

let source = null;
let paused = kept("paused") === "yes";
let awaySince = null;
let failures = 0;
let retry = null;
let due = null; // the timer of the next refresh
let lastRefresh = 0;
let running = false;
const stale = new Set(); // elements to reload
let everything = false; // the next refresh ignores the pauses of figures
const fetchedAt = new WeakMap();

export function start() {
  document.addEventListener("rhyme:stale", () => markAll());
  if (!url) return;
  pause.hidden = indicator.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    keep("paused", paused ? "yes" : null);
    wake();
  });
  document.addEventListener("visibilitychange", wake);
  setInterval(tick, TICK_MS);
  for (const element of elements()) fetchedAt.set(element, Date.now());
  wake();
}

const elements = () => [...pieces.all(), ...figures.all()];
const asleep = () => paused || document.hidden;

function wake() {
  document.dispatchEvent(new CustomEvent("rhyme:awake", { detail: !asleep() }));
  if (asleep()) disconnect();
  else if (source === null && retry === null) {
    connect();
    markAll();
  }
  show();
}

function disconnect() {
  source?.close();
  source = null;
  clearTimeout(retry);
  retry = null;
}

// Only the kinds of events that this page needs, so that a busy run's other events are not sent.
function address() {
  const waiting = elements().filter((element) => !element.dataset.every || element.dataset.on);
  if (waiting.length === 0 || waiting.some((element) => !element.dataset.on)) return url;
  const kinds = new Set(waiting.flatMap((element) => element.dataset.on.split(" ")));
  return `${url}?${[...kinds].map((kind) => `kind=${encodeURIComponent(kind)}`).join("&")}`;
}

function connect() {
  retry = null;
  // Without a stream (the server has too many), the page is updated whenever it requests one.
  if (failures > 0 && awaySince === null) markAll();
  const mine = new EventSource(address());
  source = mine;
  // Ignore events of a stream that has been closed meanwhile.
  mine.addEventListener("open", () => mine === source && back());
  mine.addEventListener("message", (event) => mine === source && changed(event.data));
  mine.addEventListener("error", () => mine === source && void lost());
}

function back() {
  // Neither stream reported the events between them.
  const missed = failures > 0 || awaySince !== null;
  failures = 0;
  awaySince = null;
  if (missed) markAll();
  show();
}

async function lost() {
  // The browser's own retry stops at the first response that is no stream (a proxy's 502, our 503).
  source?.close();
  source = null;
  if (asleep()) return;
  try {
    // Check whether the server responds and this session is still valid.
    await ask("/api/v1/session");
  } catch (error) {
    if (!("status" in error)) throw error;
    if (error.status === 401) return signedOut();
    // The stream may have opened meanwhile, which shows that the server responds.
    if (source === null) awaySince ??= Date.now();
  }
  if (asleep() || source !== null || retry !== null) return show();
  retry = setTimeout(connect, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  failures += 1;
  show();
}

function changed(data) {
  const { kind } = JSON.parse(data);
  for (const element of elements()) {
    const kinds = element.dataset.on?.split(" ");
    if (!kinds || kind === undefined || kinds.includes(kind)) stale.add(element);
  }
  schedule();
}

function markAll() {
  // The page missed all events meanwhile, possibly many.
  everything = true;
  for (const element of elements()) stale.add(element);
  schedule();
}

const dueAt = (element) => ("figure" in element.dataset && !everything ? figures.dueAt(element) : 0);

function tick() {
  if (awaySince !== null) show();
  if (asleep() || awaySince !== null) return;
  for (const piece of pieces.all()) {
    const every = Number(piece.dataset.every ?? 0) * 1000;
    const isDue = every > 0 && Date.now() - (fetchedAt.get(piece) ?? 0) >= every;
    if (isDue || "stale" in piece.dataset) stale.add(piece);
  }
  schedule();
}

function schedule() {
  if (stale.size === 0 || running || awaySince !== null) return;
  const next = Math.max(lastRefresh + REFRESH_MS, Math.min(...[...stale].map(dueAt)));
  clearTimeout(due);
  due = setTimeout(() => void refresh(), Math.max(0, next - Date.now()));
}

async function refresh() {
  if (url && asleep()) return; // stale elements stay stale
  lastRefresh = Date.now();
  running = true;
  const now = [...stale].filter((element) => dueAt(element) <= lastRefresh);
  for (const element of now) stale.delete(element);
  everything = false;
  const done = await Promise.allSettled(now.map((element) => fetchAgain(element)));
  running = false;
  for (const { reason } of done) {
    if (reason && !("status" in reason)) throw reason;
  }
  if (done.some(({ reason }) => reason?.away)) {
    // Only a newly opened stream tells that the server is back.
    if (url && source !== null) void lost();
    if (url) return;
  }
  show();
  document.dispatchEvent(new CustomEvent("rhyme:refreshed"));
  schedule();
}

async function fetchAgain(element) {
  if (!element.isConnected) return;
  fetchedAt.set(element, Date.now());
  if ("figure" in element.dataset) return figures.refresh(element);
  delete element.dataset.stale;
  return pieces.refresh(element);
}

function show() {
  if (!url) return;
  pause.textContent = paused ? "Resume updates" : "Pause";
  pause.setAttribute("aria-pressed", String(paused));
  const state = paused ? "paused" : awaySince !== null ? "away" : "live";
  const text =
    state === "away" ? `Server not reachable since ${new Date(awaySince).toLocaleTimeString()}` : { live: "Live", paused: "Paused" }[state];
  indicator.dataset.state = state;
  // Written only when it changes, because screen readers read each change aloud.
  if (indicator.textContent !== text) indicator.textContent = text;
}
