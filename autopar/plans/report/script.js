"use strict";
const tip = document.getElementById("tip");
function show(element) {
  tip.textContent = element.dataset.f;
  tip.hidden = false;
  element.setAttribute("aria-describedby", "tip");
  const box = element.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const above = box.top > own.height + 12;
  tip.style.top = (above ? box.top - own.height - 8 : box.bottom + 8) + "px";
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - own.width - 4)) + "px";
}
function hide() { tip.hidden = true; }
for (const [on, off] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  document.addEventListener(on, (e) => { const n = e.target.closest("[data-f]"); if (n) show(n); });
  document.addEventListener(off, (e) => { if (e.target.closest("[data-f]")) hide(); });
}
document.addEventListener("keydown", (e) => { if (e.key === "Escape") hide(); });

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});

for (const button of document.querySelectorAll("button.axis")) {
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    for (const b of document.querySelectorAll("button.axis")) b.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(on));
    const ranks = new Set(on ? button.dataset.ranks.split(" ") : []);
    for (const d of document.querySelectorAll(".device")) d.classList.toggle("marked", ranks.has(d.dataset.rank));
  });
}

function bytes(n) {
  for (const [unit, power] of [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]])
    if (n >= 2 ** power) return (n / 2 ** power).toFixed(2) + " " + unit;
  return n + " B";
}
function time(s) { return s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " us"; }

for (const chart of document.querySelectorAll("svg[data-memory]")) {
  const data = JSON.parse(chart.dataset.memory), step = +chart.dataset.step || 1, tail = +chart.dataset.tail;
  const line = chart.querySelector(".cursor"), said = chart.parentElement.querySelector(".said");
  const width = chart.viewBox.baseVal.width;
  let at = 0;
  function go(i) {
    at = Math.max(0, Math.min(i, data.t.length - 1));
    const x = data.t[at] / step * width * (1 - tail);
    line.setAttribute("x1", x); line.setAttribute("x2", x);
    const held = Object.entries(data.k).map(([k, v]) => [k, v[at]]).filter(([, v]) => v);
    const total = held.reduce((sum, [, v]) => sum + v, 0);
    said.textContent = `${time(data.t[at])}: ${bytes(total)} = ` + held.map(([k, v]) => `${k} ${bytes(v)}`).join(" + ");
  }
  chart.addEventListener("mousemove", (e) => {
    const box = chart.getBoundingClientRect(), t = (e.clientX - box.left) / box.width / (1 - tail) * step;
    let i = 0;
    while (i + 1 < data.t.length && data.t[i + 1] <= t) i++;
    go(i);
  });
  chart.addEventListener("keydown", (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[e.key];
    if (e.key === "Home") go(0); else if (e.key === "End") go(data.t.length); else if (by) go(at + by); else return;
    e.preventDefault();
  });
}

for (const chart of document.querySelectorAll("svg.timeline")) {
  const blocks = [...chart.querySelectorAll("rect.b")], said = chart.closest("section").querySelector(".said");
  let at = -1;
  function go(i) {
    if (at >= 0) blocks[at].classList.remove("at");
    at = Math.max(0, Math.min(i, blocks.length - 1));
    blocks[at].classList.add("at");
    said.textContent = blocks[at].dataset.f;
  }
  chart.addEventListener("keydown", (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[e.key];
    if (!blocks.length) return;
    if (e.key === "Home") go(0); else if (e.key === "End") go(blocks.length); else if (by) go(at + by); else return;
    e.preventDefault();
  });
}
