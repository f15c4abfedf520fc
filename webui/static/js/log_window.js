// The part of a log that is on the page: whole lines around the reader's position; scrolling loads more.
//   One text node per chunk, so that text is never parsed as HTML; at most KEPT characters for a file of any size.
import { ask } from "./ask.js";

const CHUNK = 128 * 1024;
const LINES = 500;
const KEPT = 3 * 1024 * 1024;
const CODES = /\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\^_])/g;

export class LogWindow {
  // `place`: the element that holds the text; `address`: the API's address of this log.
  constructor(place, address) {
    this.place = place;
    this.address = address;
    this.chunks = []; // { node, start, end }, in the order of the file
    this.size = 0;
    this.busy = false;
  }

  get start() {
    return this.chunks[0]?.start ?? 0;
  }

  get end() {
    return this.chunks.at(-1)?.end ?? 0;
  }

  get atEnd() {
    return this.end >= this.size;
  }

  async toEnd() {
    this.clear();
    this.append(await this.read({ tail: LINES }));
    this.place.scrollTop = this.place.scrollHeight;
  }

  async toStart() {
    this.clear();
    this.append(await this.read({ start: 0, length: CHUNK }));
    this.place.scrollTop = 0;
  }

  // Loads the line that starts at this byte, and the lines around it.
  async to(byte) {
    const [before, from] = await Promise.all([
      byte > 0 ? this.read({ before: byte, tail: LINES }) : null,
      this.read({ start: byte, length: CHUNK }),
    ]);
    this.clear();
    if (before) this.append(before);
    this.append(from, true);
  }

  holds(byte) {
    return this.chunks.length > 0 && byte >= this.start && byte < this.end;
  }

  // The end of the loaded part that the reader approaches, if the log goes on there: "above", "below" or "".
  shortAt() {
    const near = this.place.clientHeight;
    if (this.chunks.length === 0) return "";
    if (this.place.scrollTop < near && this.start > 0) return "above";
    const below = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight;
    return below < near && !this.atEnd ? "below" : "";
  }

  // Loads more at that end.
  async extend() {
    const where = this.shortAt();
    if (this.busy || !where) return;
    this.busy = true;
    try {
      if (where === "above") this.prepend(await this.read({ before: this.start, tail: LINES }));
      else this.append(await this.read({ start: this.end, length: CHUNK }));
    } finally {
      this.busy = false;
    }
  }

  async read(query) {
    const response = await ask(`${this.address}?${new URLSearchParams(query)}`);
    return response.json();
  }

  // Colours and movements of a terminal say nothing on a page. The downloaded file has them.
  static plain = (text) => text.replace(CODES, "");

  clear() {
    this.chunks = [];
    this.place.replaceChildren();
  }

  // `apart`: adds a separate node, so that its beginning can be found.
  append(chunk, apart = false) {
    this.size = chunk.size;
    if (chunk.end === chunk.start) return;
    // The pieces are not adjacent, because the file was truncated or rewritten.
    if (this.chunks.length > 0 && chunk.start !== this.end) this.clear();
    const last = this.chunks.at(-1);
    const text = LogWindow.plain(chunk.text);
    if (last && !apart && last.node.length + text.length < CHUNK) {
      last.node.appendData(text);
      last.end = chunk.end;
    } else {
      const node = document.createTextNode(text);
      this.place.append(node);
      this.chunks.push({ node, start: chunk.start, end: chunk.end });
    }
    this.shrink(() => this.chunks.shift(), true);
  }

  prepend(chunk) {
    this.size = chunk.size;
    if (chunk.end !== this.start || chunk.text === "") return;
    const height = this.place.scrollHeight;
    const node = document.createTextNode(LogWindow.plain(chunk.text));
    this.place.prepend(node);
    this.chunks.unshift({ node, start: chunk.start, end: chunk.end });
    this.place.scrollTop += this.place.scrollHeight - height;
    this.shrink(() => this.chunks.pop(), false);
  }

  // Removes the text farthest from the reader; the visible text does not move.
  shrink(take, above) {
    let kept = this.chunks.reduce((sum, chunk) => sum + chunk.node.length, 0);
    while (kept > KEPT && this.chunks.length > 1) {
      const { node } = take();
      kept -= node.length;
      const height = this.place.scrollHeight;
      node.remove();
      if (above) this.place.scrollTop -= height - this.place.scrollHeight;
    }
  }

  // Ranges of all matches of `text` (ignoring case) in the loaded part.
  ranges(text) {
    const wanted = text.toLowerCase();
    const found = [];
    if (!wanted) return found;
    for (const { node, start } of this.chunks) {
      const lowered = node.data.toLowerCase();
      // Lower case may change the length ("İ"); such a chunk is searched unchanged.
      const data = lowered.length === node.length ? lowered : node.data;
      for (let at = data.indexOf(wanted); at >= 0; at = data.indexOf(wanted, at + wanted.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + wanted.length);
        found.push({ range, chunk: start });
      }
    }
    return found;
  }
}
