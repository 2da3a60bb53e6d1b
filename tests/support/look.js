// What is wrong with the page that is shown, as sentences; none if nothing is. Run in the page, as the body of a function.

const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
await frame();
const faults = [];
const all = (what, within = document) => [...within.querySelectorAll(what)];
const title = (element) => element.closest("figure, section, header")?.querySelector("h1, h2, h3")?.textContent ?? "the page";

// Nothing is wider than the window.
if (document.documentElement.scrollWidth > innerWidth) faults.push(`scrolls sideways: ${document.documentElement.scrollWidth} px in ${innerWidth}`);
for (const element of all("body *")) {
  const { left, right } = element.getBoundingClientRect();
  if (right > innerWidth + 0.5 || (left < -0.5 && !element.matches(".skip"))) faults.push(`${title(element)}: reaches beyond the window: ${element.outerHTML.slice(0, 90)}`);
}

// No value of a program's stands where a person reads.
for (const word of document.body.innerText.match(/\b(?:NaN|undefined|null|Infinity)\b|\[object/g) ?? []) faults.push(`says ${word}`);

// No text lies over another, whether in a picture or not; what scrolls within a box, or is shown on demand, is left out.
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const words = [];
while (walk.nextNode()) {
  const node = walk.currentNode;
  const element = node.parentElement;
  if (!node.textContent.trim() || element.closest("title, script, noscript, .tip, .skip, .group ol, .question, .peers small, [hidden]")) continue;
  const hidden = element.closest("thead");
  if (hidden && hidden.getBoundingClientRect().width < 2) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const { left, right, top, bottom } of range.getClientRects()) {
    if (right > left) words.push({ left: left + 1, right: right - 1, top: top + 1.5, bottom: bottom - 1.5, text: node.textContent, element });
  }
}
words.sort((one, other) => one.top - other.top);
words.forEach((one, index) => {
  for (let next = index + 1; next < words.length && words[next].top < one.bottom; next++) {
    const other = words[next];
    if (other.left < one.right && other.right > one.left) faults.push(`${title(one.element)}: “${one.text}” lies over “${other.text}”`);
  }
});

// What is written in a picture can be read.
for (const text of all("main svg text")) {
  const size = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
  if (size < 9) faults.push(`${title(text)}: “${text.textContent}” is ${size.toFixed(1)} px high`);
}

// What is a share has an axis that ends with it; what is rare flattens nothing.
for (const figure of all("figure.chart").filter((one) => one.querySelector(".plot .base"))) {
  const labels = all(".tick[text-anchor=end]", figure).map((label) => label.textContent);
  if (/foreign_share|pass|own_reward/.test(figure.dataset.keys) && labels.some((label) => Number(label) > 1)) faults.push(`${title(figure)}: an axis of shares reads ${labels.join(", ")}`);
  const ends = all(".grid, .base", figure).map((line) => Number(line.getAttribute("y1")));
  const [top, base] = [Math.min(...ends), Math.max(...ends)];
  const paths = all(".plot path.line, .plot path.area", figure).map((path) => path.getAttribute("d"));
  for (const peak of all(".peak", figure)) {
    const at = `${(parseFloat(peak.getAttribute("d").slice(1)) + 4).toFixed(1)} 10.0`;
    if (!paths.some((d) => d.includes(at))) faults.push(`${title(figure)}: a peak that is drawn whole is called cut off`);
  }
  const end = figure.querySelector(".base").getAttribute("x2") - 1; // the present is never cut off
  const heights = paths.flatMap((d) => [...d.matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].filter(([, x]) => x < end).map(([, , y]) => base - y)).sort((one, other) => one - other);
  if (heights.length > 9 && heights.at(-1) > (base - top) / 2 && heights[Math.floor(0.94 * heights.length)] < (base - top) / 10) faults.push(`${title(figure)}: all but a few values lie flat`);
}

// The labels of an axis differ, also when clocks are changed.
const { TIME } = await import("/charts.js");
for (const day of [84, 85, 86, 87, 294, 295, 296, 297]) { // of 2026
  const [begin, length] = [1767225600 + 86400 * day, 604800];
  const labels = TIME.labels(TIME.ticks(begin, begin + length, 8), length);
  if (new Set(labels).size < labels.length || labels.some((label) => label.includes(":"))) faults.push(`an axis of time reads ${labels.join(", ")}`);
}
for (const plot of all(".plot")) {
  for (const anchor of ["end", "middle"]) {
    const labels = all(`.tick:not(.name)[text-anchor=${anchor}]`, plot).map((label) => label.textContent);
    if (new Set(labels).size < labels.length) faults.push(`${title(plot)}: an axis reads ${labels.join(", ")}`);
  }
}

// Each series that has values is drawn, within its picture.
const answer = async (path) => (await fetch(path)).json();
const known = new Set();
const note = (columns) => Object.entries(columns).forEach(([key, values]) => values.some((value) => value !== null) && known.add(key));
if (document.querySelector("#history")) {
  const { at, history: rows = [] } = await answer("swarm.json");
  const rate = all(".tile").find((one) => one.innerText.startsWith("Groups a minute"));
  if (rows.length && rows.at(-1)[0] < at - Math.max(7200, 5 * (rows.at(-1)[0] - rows.at(-2)?.[0])) && !rate.innerText.includes("–")) faults.push(`of hours ago: ${rate.innerText}`);
  note(Object.fromEntries(["step", "nodes", "groups", "pass"].map((key, column) => [key, rows.map((row) => row[column])])));
} else {
  const { steps, evaluations, joined } = await answer("/api/history");
  note(steps);
  note(evaluations);
  const { step, step_seconds: each, foreign_weight_share: share, worker_memory_bytes: memory, addresses = [], uptime } = await answer("/api/status");
  const tile = all(".tile").find((one) => one.innerText.startsWith("Others' loss share"));
  const { peers = [], names = {} } = await answer("/api/peers");
  for (const { id } of peers) if (!all("#peers code").some((code) => code.title === id)) faults.push(`${id} is not among the peers`);
  for (const [id, name] of Object.entries(names).filter(([id]) => !addresses[0]?.endsWith(id))) { // its own is at the top
    const told = all("#peers code").find((code) => code.title === id)?.innerText;
    if (told !== (/12D3|\S{40}/.test(name) ? `…${id.slice(-8)}` : name)) faults.push(`${name} is called ${told}`);
  }
  if (all("#peers .badge").filter((badge) => badge.innerText.includes("left out")).length > 9) faults.push("a crowd that was left out fills the table");
  const several = all("#peers tr").find((row) => row.innerText.startsWith("others"));
  if (several?.innerText.includes("not here now")) faults.push("all who are counted together are not here");
  if (memory && !all("#network div").some((row) => row.innerText.startsWith("Memory") && row.innerText.includes("compute"))) faults.push("the memory of the compute process is not told");
  const figures = (within) => all("b, strong", within).map(({ innerText }) => parseFloat(innerText) / (innerText.includes("ms") ? 1000 : 1));
  const lasts = all(".tile").find((one) => one.innerText.startsWith("A step takes"));
  const parts = figures(document.querySelector("figure[data-keys^=generate] .legend")).reduce((sum, part) => sum + part, 0);
  if (step && Math.abs(figures(lasts)[0] - parts) > 0.15) faults.push(`${lasts.innerText}, and its parts ${parts}`);
  if (step && uptime > 60 + 20 * each && Math.abs(figures(lasts)[0] - each) > 0.15) faults.push(`${lasts.innerText} is ${each} in a terminal`);
  const mean = (key) => steps[key].slice(-Math.ceil(8 / joined)).reduce((sum, value, index, all) => sum + value / all.length, 0);
  const [mine, theirs] = figures(document.querySelector("figure[data-keys^=own_groups] .legend"));
  if (step && Math.abs(mine + theirs - mean("own_groups") - mean("foreign_groups")) > 0.15) faults.push(`${mine} and ${theirs} groups are not all`);
  if (steps.step?.length > 100 && !document.querySelector("#joined").innerText.includes("faint")) faults.push("a faint line is not explained");
  if (steps.step?.[0] > 300 && !document.querySelector("#joined").innerText.includes("is gone")) faults.push("a curve begins late and does not say so");
  if (steps.step?.length > 100 && !document.querySelector("figure[data-keys^=own_reward] .line.raw")) faults.push("no line of means runs through many points");
  if (step && Math.abs(parseFloat(tile.querySelector("strong").innerText) - 100 * share) > 2) faults.push(`${tile.innerText} is ${share} in a terminal`);
}
for (const figure of all("figure.chart")) {
  const due = figure.dataset.keys.split(" ").filter((key) => known.has(key));
  const drawn = new Set();
  const frame = figure.querySelector(".plot .base")?.getBoundingClientRect();
  const { top, bottom } = figure.querySelector(".plot").getBoundingClientRect();
  for (const mark of all(".plot path.line, .plot path.area, .plot circle.dot", figure)) {
    const box = mark.getBoundingClientRect();
    if (mark.matches(".line") ? !mark.getTotalLength() : !box.width) continue;
    drawn.add(mark.getAttribute("class").split(" ").at(-1));
    if (box.left < frame.left - 4 || box.right > frame.right + 4 || box.top < top - 4 || box.bottom > bottom + 4) faults.push(`${title(figure)}: a curve leaves its picture`);
  }
  if (drawn.size < due.length) faults.push(`${title(figure)}: ${due.length} series have values, and ${drawn.size} are drawn`);
}

// No line goes on where nothing was measured.
for (const path of all(".plot path.line")) {
  const { width } = path.closest(".plot").querySelector(".base").getBBox();
  const points = [...path.getAttribute("d").matchAll(/([ML])([-\d.]+)/g)];
  const wide = points.some(([, to, x], index) => to === "L" && x - points[index - 1][2] > width / 5);
  if (points.length > 24 && wide) faults.push(`${title(path)}: a line crosses a time without values`);
}

for (const row of all(".nodes tr.gone")) if (row.querySelector(".silent") && row.cells[3].textContent === "0") faults.push(`a row tells nothing: ${row.innerText}`);

// The last row of tiles is full.
const box = (what) => document.querySelector(what)?.getBoundingClientRect().right;
if (box(".tile:last-child") < box(".tiles") - 1) faults.push("a tile is alone in its row");

// A figure has a name, and a row says a thing once.
for (const cell of all("table.peers td").filter((cell) => /^[–\d]/.test(cell.innerText))) {
  const head = cell.closest("table").tHead.getBoundingClientRect();
  if (head.width < 2 && !getComputedStyle(cell, "::before").content.startsWith('"')) faults.push(`${title(cell)}: ${cell.innerText} has no name`);
}
for (const cell of all("tbody th, tbody td")) {
  const told = cell.innerText.split("\n").map((line) => line.trim()).filter(Boolean);
  if (new Set(told).size < told.length) faults.push(`${title(cell)}: a cell says twice: ${told.join(" | ")}`);
}

// What grows old says so.
if (document.querySelector("#history .plot svg")) {
  const clock = Date.now;
  Date.now = () => clock() + 3e9; // a month: the clocks of the week's nodes are days ahead
  document.dispatchEvent(new Event("visibilitychange"));
  const state = document.querySelector("#state");
  for (let frames = 0; frames < 300 && !state.innerText.includes("OLD"); frames++) await frame();
  if (!state.innerText.includes("OLD")) faults.push(`of a month ago: ${state.innerText}`);
  Date.now = clock;
}
return [...new Set(faults)];
