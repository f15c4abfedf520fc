// Work on the page, one piece a task: between two, the browser answers the reader and paints.

const { port1, port2 } = new MessageChannel();
const waiting = []; // what a message of its own begins
port1.onmessage = () => waiting.shift()();

const nextTask = () =>
  new Promise((resolve) => {
    waiting.push(resolve);
    port2.postMessage(null);
  });

let last = Promise.resolve();

// Do it in a task of its own, after all that were given before; gives what it gives.
export function inTurn(work) {
  const mine = last.then(nextTask).then(work);
  last = mine.catch(() => {}); // whoever gave it hears of it
  return mine;
}
