// The reader's theme, before the first paint: "light", "dark", or none (as the system says). Not a module: it must block.
(() => {
  try {
    const kept = localStorage.getItem("rhyme.theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch {
    // Storage may be forbidden: then the system decides.
  }
})();
