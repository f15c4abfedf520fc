// Short messages in the page's corner. Errors stay until the reader closes them.
const SHOWN_MS = 5000;

export function toast(text, bad = false) {
  const box = document.querySelector("[data-toasts]");
  const item = document.createElement("div");
  item.className = bad ? "toast toast-bad" : "toast";
  const line = document.createElement("p");
  line.textContent = text;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "quiet small";
  close.textContent = "Close";
  close.addEventListener("click", () => item.remove());
  item.append(line, close);
  box.append(item);
  if (!bad) setTimeout(() => item.remove(), SHOWN_MS);
}
