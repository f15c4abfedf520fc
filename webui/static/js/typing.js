// Whether a key belongs to what the reader writes or chooses, or to the browser, and not to the page.
export const writes = (event) =>
  event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea, [contenteditable]") !== null;
