// Menus and tabs wider than a phone's window: scroll to the current entry.
export function start() {
  // After the page's first layout, not before it.
  requestAnimationFrame(() => {
    for (const here of document.querySelectorAll(".menu [aria-current], .tabs [aria-current]")) {
      const row = here.parentElement.getBoundingClientRect();
      const place = here.getBoundingClientRect();
      if (place.right > row.right) here.parentElement.scrollLeft += place.right - row.right;
    }
  });
}
