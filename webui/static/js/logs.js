// The logs page: reads, follows and searches one log (the elements are those of templates/logs.html).
import { ask } from "./ask.js";
import { keep, kept } from "./kept.js";
import { LogWindow } from "./log_window.js";

const root = document.querySelector("[data-log]");
const part = (name) => root.querySelector(`[data-log-${name}]`);
const place = part("text");
const form = part("form");
const follow = part("follow");
const wrap = part("wrap");
const view = new LogWindow(place, root.dataset.log);

// The browser's own retry stops at the first response that is no stream.
const RETRY_MS = 3000;

let source = null;
let retry = null;
let awake = true;
let text = ""; // the text of the search
let matches = []; // lines of the file: { start, text }
let scanned = 0; // the number of bytes of the file that were searched
let current = -1;

// ---- reading ----

function say(message) {
  part("state").textContent = message;
}

function showPlace() {
  const kb = (bytes) => `${Math.round(bytes / 1024).toLocaleString("en")} KiB`;
  part("place").textContent = view.size === 0 ? "" : `${kb(view.start)} to ${kb(view.end)} of ${kb(view.size)}`;
}

const idle = () =>
  view.size === 0 ? "This log is empty so far." : source?.readyState === EventSource.OPEN ? "Following" : "";

async function attempt(work) {
  try {
    await work();
    say(idle());
  } catch (error) {
    if (!("status" in error)) throw error;
    say(error.message);
  }
  showPlace();
  mark();
}

const atBottom = () => place.scrollHeight - place.scrollTop - place.clientHeight < 8;

place.addEventListener("scroll", () => {
  if (!view.busy && view.shortAt()) void attempt(() => view.extend());
});
part("start").addEventListener("click", () => {
  setFollow(false);
  void attempt(() => view.toStart());
});
part("end").addEventListener("click", () => void attempt(() => view.toEnd()));

// ---- following ----

function setFollow(on) {
  follow.checked = on;
  keep("follow", on ? "yes" : null);
  connect();
}

function disconnect() {
  source?.close();
  source = null;
  clearTimeout(retry);
  retry = null;
}

function connect() {
  disconnect();
  if (!follow.checked || !awake) return;
  source = new EventSource(`${root.dataset.logStream}?start=${view.end}`);
  source.addEventListener("open", () => say("Following"));
  source.addEventListener("message", (event) => {
    const stays = atBottom() || view.chunks.length === 0;
    view.append(JSON.parse(event.data));
    if (stays) place.scrollTop = place.scrollHeight;
    showPlace();
    mark();
  });
  source.addEventListener("error", () => {
    disconnect();
    say("The server does not respond: trying again");
    // Continue where the text ends, so that nothing is missed.
    retry = setTimeout(connect, RETRY_MS);
  });
}

follow.addEventListener("change", () => {
  keep("follow", follow.checked ? "yes" : null);
  if (!follow.checked) {
    disconnect();
    say("");
    return;
  }
  void attempt(() => view.toEnd()).then(connect);
});
document.addEventListener("rhyme:awake", (event) => {
  awake = event.detail;
  if (awake) connect();
  else disconnect();
});

// ---- searching ----

function mark() {
  if (!("highlights" in CSS)) return;
  const found = view.ranges(text);
  CSS.highlights.set("found", new Highlight(...found.map(({ range }) => range)));
}

function showFound() {
  const more = scanned < view.size && matches.length > 0;
  const where = scanned < view.size ? ` in the first ${Math.round(scanned / 1048576).toLocaleString("en")} MB` : "";
  part("found").textContent = !text
    ? ""
    : matches.length === 0
      ? `Not found${where}`
      : `${current >= 0 ? `${current + 1} of ` : ""}${matches.length.toLocaleString("en")}${more ? "+" : ""} lines`;
  part("previous").disabled = current <= 0;
  part("next").disabled = matches.length === 0 || (current >= matches.length - 1 && !more);
}

async function lookOn() {
  const query = new URLSearchParams({ text, start: scanned });
  const answer = await (await ask(`${root.dataset.logSearch}?${query}`)).json();
  matches = matches.concat(answer.items);
  scanned = answer.scanned_to;
  view.size = answer.size;
}

async function find() {
  text = form.elements.q.value;
  matches = [];
  scanned = 0;
  current = -1;
  remember({ q: text, at: "" });
  if (text) {
    await lookOn();
    // A rare text in a huge log: search one part after the other until there is a match.
    while (matches.length === 0 && scanned < view.size) {
      showFound();
      await lookOn();
    }
  }
  if (matches.length > 0) await show(0);
  showFound();
}

async function show(index) {
  if (index >= matches.length && scanned < view.size) await lookOn();
  if (index < 0 || index >= matches.length) return showFound();
  current = index;
  const { start } = matches[index];
  setFollow(false);
  await view.to(start);
  remember({ at: String(start) });
  reveal(start);
  showFound();
}

// Scrolls to the first match at or behind this byte.
function reveal(byte) {
  const chunk = view.chunks.find((one) => one.start === byte) ?? view.chunks[0];
  const found = view.ranges(text).find((one) => one.chunk >= (chunk?.start ?? 0));
  let range = found?.range;
  if (!range && chunk) {
    range = new Range();
    range.selectNode(chunk.node);
  }
  if (!range) return;
  if (found && "highlights" in CSS) CSS.highlights.set("found-now", new Highlight(range));
  const top = range.getClientRects()[0]?.top ?? place.getBoundingClientRect().top;
  place.scrollTop += top - place.getBoundingClientRect().top - place.clientHeight / 3;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  // The same text again: go to its next match.
  void attempt(() => (form.elements.q.value === text && matches.length > 0 ? show(current + 1) : find()));
});
form.elements.q.addEventListener("search", () => {
  if (form.elements.q.value === "" && text !== "") void attempt(find);
});
part("next").addEventListener("click", () => void attempt(() => show(current + 1)));
part("previous").addEventListener("click", () => void attempt(() => show(current - 1)));

// The address links to the shown match; another search adds no entry to the history.
function remember(changes) {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) {
    if (value) url.searchParams.set(name, value);
    else url.searchParams.delete(name);
  }
  history.replaceState(null, "", url);
}

// ---- start ----

wrap.checked = kept("wrap") === "yes";
place.classList.toggle("wrapped", wrap.checked);
wrap.addEventListener("change", () => {
  keep("wrap", wrap.checked ? "yes" : null);
  place.classList.toggle("wrapped", wrap.checked);
});

text = form.elements.q.value;
const at = root.dataset.at;
follow.checked = kept("follow") === "yes" && !at && !text;
void attempt(async () => {
  if (at) {
    await view.to(Number(at));
    reveal(Number(at));
    if (text) {
      await lookOn();
      current = matches.findIndex(({ start }) => start === Number(at));
      showFound();
    }
  } else {
    await view.toEnd();
    if (text) await find();
  }
}).then(connect);
