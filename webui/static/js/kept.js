// The reader's choices, kept in the browser. If storage is forbidden, they last as long as the page.
const memory = new Map();

export function kept(name) {
  try {
    return localStorage.getItem(`rhyme.${name}`);
  } catch {
    return memory.get(name) ?? null;
  }
}

export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(`rhyme.${name}`);
    else localStorage.setItem(`rhyme.${name}`, value);
  } catch {
    memory.set(name, value);
  }
}
