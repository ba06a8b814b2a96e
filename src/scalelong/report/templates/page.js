"use strict";
// The page: methods switched on and off, the block chosen, the samples' slider, light and dark.

const DATA = JSON.parse(document.getElementById("data").textContent);
const charts = DATA.charts.map((spec) => new Chart(spec, DATA.groups));

for (const button of document.querySelectorAll("button.method"))
  button.addEventListener("click", () => {
    const group = Number(button.dataset.group);
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    for (const chart of charts) {
      chart.leave();
      chart.hidden[on ? "delete" : "add"](group);
      chart.draw();
    }
    for (const film of document.querySelectorAll(`.film[data-group="${group}"]`)) film.hidden = !on;
  });

const blocks = document.getElementById("block");
blocks?.addEventListener("change", () => {
  for (const chart of charts.filter((c) => c.spec.variants)) {
    chart.leave();
    chart.variant = blocks.value;
    chart.draw();
  }
});

const slider = document.getElementById("film-step");
slider?.addEventListener("input", () => {
  const step = Number(slider.dataset.steps.split(",")[Number(slider.value)]);
  const text = `step ${step.toLocaleString("en")}`;
  slider.setAttribute("aria-valuetext", text);
  document.getElementById("film-now").textContent = text;
  for (const film of document.querySelectorAll(".film")) {
    const frames = [...film.querySelectorAll("img")];
    const past = frames.filter((frame) => Number(frame.dataset.step) <= step);
    const now = past.length ? past[past.length - 1] : frames[0];
    for (const frame of frames) frame.hidden = frame !== now;
    film.querySelector(".film-at").textContent = Number(now.dataset.step) === step ? "" : `step ${now.dataset.step}`;
  }
});

// ------------------------------------------------------------------------------------------------- light and dark

const theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const stored = () => {
  try {
    return localStorage.getItem("scalelong-theme");
  } catch {
    return null; // a file opened where storage is forbidden
  }
};

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  const dark = name ? name === "dark" : system.matches;
  theme.setAttribute("aria-pressed", String(dark));
}

theme.addEventListener("click", () => {
  const name = theme.getAttribute("aria-pressed") === "true" ? "light" : "dark";
  setTheme(name);
  try {
    localStorage.setItem("scalelong-theme", name);
  } catch {
    // it then lasts until the page is closed
  }
});
system.addEventListener("change", () => setTheme(stored()));
setTheme(stored());
