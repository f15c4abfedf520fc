// Work on the page in separate tasks, so that the browser can handle input and paint between them.

const { port1, port2 } = new MessageChannel();
const waiting = []; // functions that resume a waiting task
port1.onmessage = () => waiting.shift()();

const nextTask = () =>
  new Promise((resolve) => {
    waiting.push(resolve);
    port2.postMessage(null);
  });

let last = Promise.resolve();

// Runs `work` in a task of its own, after all earlier ones; returns its result.
export function inTurn(work) {
  const mine = last.then(nextTask).then(work);
  last = mine.catch(() => {}); // the caller handles the error
  return mine;
}
