// One stream a page says that something happened; what it concerns is fetched again, at most once a second, and a figure
// in sight when it has rested (figures.js). What is stale stays so until it was fetched: the last event is always drawn.
//   <body data-live="/api/v1/...">   the stream
// Nothing is fetched while the page is hidden or paused: it catches up afterwards. A server that does not answer is
// asked again and again, less and less often, and said so.
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
const stale = new Set(); // elements to fetch again
let everything = false; // the next refresh lets no figure rest
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

// Only the kinds that something on this page waits for, so that a busy run's other events are not sent here.
function address() {
  const waiting = elements().filter((element) => !element.dataset.every || element.dataset.on);
  if (waiting.length === 0 || waiting.some((element) => !element.dataset.on)) return url;
  const kinds = new Set(waiting.flatMap((element) => element.dataset.on.split(" ")));
  return `${url}?${[...kinds].map((kind) => `kind=${encodeURIComponent(kind)}`).join("&")}`;
}

function connect() {
  retry = null;
  // Without a stream (the server has too many), the page is brought up to date as often as it asks for one.
  if (failures > 0 && awaySince === null) markAll();
  const mine = new EventSource(address());
  source = mine;
  // Events of a stream that was given up meanwhile say nothing.
  mine.addEventListener("open", () => mine === source && back());
  mine.addEventListener("message", (event) => mine === source && changed(event.data));
  mine.addEventListener("error", () => mine === source && void lost());
}

function back() {
  // What happened between two streams was not said in either.
  const missed = failures > 0 || awaySince !== null;
  failures = 0;
  awaySince = null;
  if (missed) markAll();
  show();
}

async function lost() {
  // The browser's own retry gives up at the first answer that is no stream (a proxy's 502, our 503).
  source?.close();
  source = null;
  if (asleep()) return;
  try {
    // Does the server answer at all, and is this session still good?
    await ask("/api/v1/session");
  } catch (error) {
    if (!("status" in error)) throw error;
    if (error.status === 401) return signedOut();
    // Meanwhile the stream may be open again: then the server does answer.
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
  // What happened meanwhile was not heard of, and may be much.
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
  if (url && asleep()) return; // what is stale stays so
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
    // One way to be away and one to come back: the stream, which is opened anew, says when the server is there.
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
  // Written only when it changes: screen readers say it each time.
  if (indicator.textContent !== text) indicator.textContent = text;
}
