// The slider over the steps of a prompt: <input type="range" data-steps="1 5 9">, whose value counts the steps.
for (const slider of document.querySelectorAll("input[data-steps]")) {
  const steps = slider.dataset.steps.split(" ");
  slider.addEventListener("input", () => {
    slider.setAttribute("aria-valuetext", `step ${steps[slider.value]}`);
    slider.title = `Step ${steps[slider.value]}`;
  });
  slider.addEventListener("change", () => {
    const target = new URL(location.href);
    target.searchParams.set("step", steps[slider.value]);
    target.searchParams.delete("cursor");
    location.assign(target);
  });
}
