// Search in a page's options: hides options that do not match, and opens folds that contain a match.
//   [data-search]         the text; the option's name or explanation must contain each of its words
//   [data-only-changed]   shows only options that are not at their default
//   [data-section]        hidden without a match; [data-found] and [data-none-found] show the number of matches
const SEARCHED = "[data-field], [data-setting]";

function matches(element, words, onlyChanged) {
  if (onlyChanged && !element.classList.contains("changed")) return false;
  const text = (element.dataset.key + " " + element.textContent).toLowerCase();
  return words.every((word) => text.includes(word));
}

function apply(root) {
  const search = root.querySelector("[data-search]");
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const onlyChanged = root.querySelector("[data-only-changed]")?.checked ?? false;
  const narrowed = words.length > 0 || onlyChanged;
  let count = 0;
  for (const element of root.querySelectorAll(SEARCHED)) {
    element.hidden = narrowed && !matches(element, words, onlyChanged);
    if (!element.hidden) count += 1;
  }
  for (const section of root.querySelectorAll("[data-feature], [data-fold], [data-section]")) {
    const found = section.querySelector("[data-field]:not([hidden]), [data-setting]:not([hidden])") !== null;
    section.hidden = narrowed && !found;
    if (!("fold" in section.dataset)) continue;
    section.dataset.was ??= String(section.open);
    section.open = narrowed ? found : section.dataset.was === "true";
    if (!narrowed) delete section.dataset.was;
  }
  const found = root.querySelector("[data-found]");
  if (found) found.textContent = narrowed ? `${count} found` : "";
  const none = root.querySelector("[data-none-found]");
  if (none) none.hidden = count > 0;
}

export const fold = {
  start(root) {
    const search = root.querySelector("[data-search]");
    search.addEventListener("input", () => apply(root));
    root.querySelector("[data-only-changed]")?.addEventListener("change", () => apply(root));
    search.addEventListener("keydown", (event) => {
      // Enter would submit the form.
      if (event.key === "Enter") event.preventDefault();
    });
  },
  showAll(root) {
    const search = root.querySelector("[data-search]");
    const only = root.querySelector("[data-only-changed]");
    if (search.value === "" && !only?.checked) return;
    search.value = "";
    if (only) only.checked = false;
    apply(root);
  },
};
