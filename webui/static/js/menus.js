// Menus and tabs that are wider than a telephone's window: the one that one is on is in sight.
export function start() {
  // Beside the page's first layout, not before it.
  requestAnimationFrame(() => {
    for (const here of document.querySelectorAll(".menu [aria-current], .tabs [aria-current]")) {
      const row = here.parentElement.getBoundingClientRect();
      const place = here.getBoundingClientRect();
      if (place.right > row.right) here.parentElement.scrollLeft += place.right - row.right;
    }
  });
}
