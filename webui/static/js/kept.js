// What the browser keeps of the reader's choices. Storage may be forbidden: then they last as long as the page.
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
