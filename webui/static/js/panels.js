// The Panels tab: the browser keeps the last panels, and shows them where the address names none.
import { keep, kept } from "./kept.js";

const NAME = "panels";
const address = new URL(location.href);

if (address.searchParams.has("panel")) {
  const panels = document.querySelector("[data-panels]").dataset.panels;
  keep(NAME, panels === "[]" ? null : panels);
} else {
  const texts = JSON.parse(kept(NAME) ?? "[]");
  for (const text of texts) address.searchParams.append("panel", text);
  if (texts.length > 0) location.replace(address);
}
