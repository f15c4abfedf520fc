// The files that a figure is saved as.

// One row per point: series, x, y, and the trace's other lists (base, text).
export function csvOf({ data, layout }) {
  const x = layout.xaxis?.title?.text ?? "x";
  const y = layout.yaxis?.title?.text ?? "y";
  const extra = ["base", "text"].filter((name) => data.some((trace) => Array.isArray(trace[name])));
  const rows = [["series", x, y, ...extra]];
  for (const trace of data) {
    const length = Math.max(trace.x?.length ?? 0, trace.y?.length ?? 0);
    for (let i = 0; i < length; i += 1) {
      const cells = [trace.name ?? "", trace.x?.[i], trace.y?.[i], ...extra.map((name) => trace[name]?.[i])];
      rows.push(cells.map(written));
    }
  }
  return rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

// Undoes the escaping for the drawing library (webui/figures/drawing/base.py).
function written(value) {
  if (typeof value !== "string") return value;
  const words = value.replaceAll("<br>", " ").replaceAll("&#37;", "%").replaceAll("&lt;", "<").replaceAll("&gt;", ">");
  return words.replaceAll("&amp;", "&");
}

// Quotes after RFC 4180. Text that a spreadsheet would run as a formula gets an apostrophe in front; numbers do not.
function field(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = String(value);
  // The same rule as in api/read/export.py.
  const isFormula = /^(?:["\s]*[=+\-@＝＋－＠]|[\t\r\n])/.test(text) && !/^[+-]?[\d.]+(?:e[+-]?\d+)?$/i.test(text);
  const safe = isFormula ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

// Turns a base64 data: URL into a blob, because the Content-Security-Policy does not let fetch() read one.
export function blobOf(url, type) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (char) => char.charCodeAt(0));
  return new Blob([bytes], { type });
}

export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}
