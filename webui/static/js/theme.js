// Applies the reader's theme before the first paint: "light", "dark", or none (the system's). No module, so it blocks.
(() => {
  try {
    const kept = localStorage.getItem("rhyme.theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // If storage is forbidden, the system's theme applies.
  }
})();
