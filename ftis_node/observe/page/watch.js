// The swarm's page: reads swarm.json, from an observer, a node or a folder of files, and shows it.

import { Chart, TIME, breaks } from "./charts.js";
import { bytes, clipped, el, find, lasting, number, percent, short, show, svg } from "./dom.js";

const POLL = 5000;
const PATIENCE = 8000;
const OLD = 600; // seconds after which files are no longer the present
const IN_PICTURE = 40;
const FEW = 12; // nodes; among more only the main teachers of each are drawn
const MAIN = 3;
const TEACHERS_TOLD = 16; // by a self-report
const ROWS = 200;

const two = (value) => number(value, 2);
const few = (value) => number(value, value < 10 ? 1 : 0);
const LATER = "appears here after some minutes.";

const CHARTS = [
  { title: "pass@1, as claimed", note: "Mean of the nodes that report it.", floor: 0, ceiling: 1, format: two, empty: `What the nodes claim to reach ${LATER}`, series: [{ key: "pass", name: "mean", tone: "own" }] },
  { title: "Groups announced", note: "A minute, by all nodes.", peaks: true, floor: 0, format: few, axis: number, empty: `How much the swarm generates ${LATER}`, series: [{ key: "groups", name: "groups", tone: "foreign" }] },
  { title: "Nodes", note: "Heard of within ten minutes.", floor: 0, whole: true, format: number, empty: `How many take part ${LATER}`, series: [{ key: "nodes", name: "nodes", tone: "third" }] },
].map((spec) => new Chart({ along: TIME, ...spec }));

const name = (node) => node.claims?.name || short(node.id);

let text = null;
let told = null;

async function poll() {
  if (document.hidden) return;
  try {
    const response = await fetch("swarm.json", { signal: AbortSignal.timeout(PATIENCE), cache: "no-cache" });
    if (!response.ok) throw new Error(`The answer was ${response.status}.`);
    const answer = await response.text();
    find("banner").hidden = true;
    if (answer !== text) draw((told = JSON.parse((text = answer))));
    if (told.nodes) showState(told); // it ages, also where files stay the same
  } catch (error) {
    find("banner").textContent = `There is no answer. ${error.message}`;
    find("banner").hidden = false;
  }
}

async function go() {
  try {
    await poll();
  } finally {
    setTimeout(go, POLL);
  }
}

function draw(swarm) {
  if (!swarm.nodes) return show(find("reason"), "The node has not joined its swarm yet.");
  const present = swarm.nodes.filter((node) => node.present);
  // Identities are free: of those that are gone, the ones that never made or said anything are only counted.
  const teachers = new Set(swarm.nodes.flatMap((node) => Object.keys(node.claims?.teachers ?? {})));
  const nodes = swarm.nodes.filter((node) => node.present || node.groups || node.claims || teachers.has(node.id));
  const facts = [
    ["Task", swarm.task],
    ["Run", el("code", { title: swarm.run }, swarm.run.slice(0, 12))],
    ["Who may join", swarm.private ? "members" : "anybody"],
    ["Watched for", lasting(swarm.at - swarm.since)],
  ];
  show(find("facts"), facts.map(([term, told]) => el("div", null, el("dt", null, term), el("dd", null, told))));
  const last = swarm.history.at(-1);
  const rate = last && !breaks([...swarm.history.map(([time]) => time), swarm.at]).at(-1) ? last[2] : null; // not of before a night
  showTiles(nodes, present, rate);
  // The present is the last point, so that a curve and its tile say the same.
  const rows = swarm.history.length ? [...swarm.history, [swarm.at, present.length, rate, mean(passes(present))]] : [];
  const [step, count, groups, pass] = [0, 1, 2, 3].map((column) => rows.map((row) => row[column]));
  for (const chart of CHARTS) chart.update({ step, nodes: count, groups, pass });
  showGraph(nodes);
  showNodes(nodes, swarm.nodes.length - nodes.length);
}

function showState(swarm) {
  const present = swarm.nodes.filter((node) => node.present);
  const age = Date.now() / 1000 - swarm.at;
  find("state").className = `state ${age > OLD ? "alone" : present.length ? "online" : "joining"}`;
  find("state").textContent = age > OLD ? `○ ${lasting(age)} OLD` : present.length ? "● LIVE" : "◌ LISTENING";
  const reporting = present.filter((node) => node.claims).length;
  show(find("reason"), `${number(present.length)} ${present.length === 1 ? "node" : "nodes"} ${age > OLD ? "then" : "now"}; ${number(reporting)} ${reporting === 1 ? "reports" : "report"} about ${reporting === 1 ? "itself" : "themselves"}.`);
}

const passes = (nodes) => nodes.map((node) => node.claims?.pass_at_1 ?? null).filter((value) => value !== null);
const mean = (values) => (values.length ? values.reduce((whole, one) => whole + one, 0) / values.length : null);

function showTiles(nodes, present, rate) {
  const claims = present.map((node) => node.claims).filter(Boolean);
  const sum = (key) => claims.reduce((whole, one) => whole + one[key], 0);
  const reached = passes(present);
  const models = new Set(claims.map((one) => one.model));
  const tokenizers = new Set(claims.map((one) => one.tokenizer));
  const versions = [...new Set(present.map((node) => node.version).filter(Boolean))].sort();
  const dialled = (how) => present.filter((node) => node.reach === how).length;
  const tiles = [
    ["Nodes", number(present.length), `${number(nodes.length - present.length)} more were here before`],
    ["Groups a minute", rate === null ? "–" : few(rate), `${number(nodes.reduce((all, node) => all + node.groups, 0))} heard of so far`],
    ["pass@1, claimed", two(mean(reached)), reached.length ? `${two(Math.min(...reached))} to ${two(Math.max(...reached))}` : "nobody reports it"],
    ["Learned from others", claims.length ? number(sum("foreign_used")) : "–", `groups, as claimed; ${number(sum("own_used"))} own`],
    ["Models, claimed", claims.length ? number(models.size) : "–", claims.length ? `${number(tokenizers.size)} ${tokenizers.size === 1 ? "tokenizer" : "tokenizers"}` : "nobody reports one"],
    ["Traffic, claimed", claims.length ? bytes(sum("bytes_out")) : "–", "sent since the nodes' starts"],
    ["Reached directly", number(dialled("direct")), `${number(dialled("relayed"))} by relays, ${number(dialled("outbound-only"))} only dial`],
    ["Versions", number(versions.length), versions.slice(0, 3).join(", ") || "not known"],
  ];
  show(find("tiles"), tiles.map(([label, value, sub]) =>
    el("li", { class: "tile" }, el("span", { class: "label" }, label), el("strong", null, value), el("span", { class: "sub" }, sub))));
}

/** Nodes on a circle; an arc from teacher to learner, the wider the more groups. */
function showGraph(all) {
  const taught = new Map();
  for (const node of all) {
    for (const [teacher, groups] of Object.entries(node.claims?.teachers ?? {})) taught.set(teacher, (taught.get(teacher) ?? 0) + groups);
  }
  const used = (node) => (taught.get(node.id) ?? 0) + (node.claims?.foreign_used ?? 0);
  const shown = all.filter((node) => node.present || used(node)).sort((one, other) => other.present - one.present || used(other) - used(one)).slice(0, IN_PICTURE);
  shown.sort((one, other) => (name(one) < name(other) ? -1 : 1));
  const places = new Map();
  const room = find("graph").clientWidth - 34;
  const narrow = room > 0 && room < 600;
  const [width, height] = [narrow ? room : 920, shown.length > 12 ? 620 : shown.length > 4 ? 420 : 320];
  const [cx, cy] = [width / 2, height / 2];
  const [rx, ry] = [width / 2 - (narrow ? 92 : 170), height / 2 - 46];
  // Down the right side and up the left one in equal steps of height: names stand beside the nodes.
  shown.forEach((node, index) => {
    const part = (2 * index) / shown.length;
    const high = part <= 1 ? 2 * part - 1 : 3 - 2 * part;
    const side = Math.sqrt(Math.max(0, 1 - high * high)) * (part <= 1 ? 1 : -1);
    places.set(node.id, { side, x: cx + rx * side, y: cy + ry * high });
  });
  const edges = shown.flatMap((node) =>
    Object.entries(node.claims?.teachers ?? {}).filter(([teacher, groups]) => groups && places.has(teacher) && teacher !== node.id)
      .sort(([, one], [, other]) => other - one).slice(0, shown.length > FEW ? MAIN : FEW)
      .map(([teacher, groups]) => ({ teacher, learner: node.id, groups })));
  const most = Math.max(1, ...edges.map(({ groups }) => groups));
  const names = new Map(shown.map((node) => [node.id, name(node)]));
  const arcs = edges.sort((one, other) => one.groups - other.groups).map(({ teacher, learner, groups }) => {
    const [from, to] = [places.get(teacher), places.get(learner)];
    // Bent towards the middle, and a little to the right of its direction, so that both ways can be told apart.
    const [mx, my] = [(from.x + to.x) / 2, (from.y + to.y) / 2];
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const [qx, qy] = [mx + (cx - mx) * 0.45 - dy * 0.12, my + (cy - my) * 0.45 + dx * 0.12];
    const part = groups / most;
    const arc = svg("path", { class: "arc", d: `M${from.x.toFixed(1)} ${from.y.toFixed(1)}Q${qx.toFixed(1)} ${qy.toFixed(1)} ${to.x.toFixed(1)} ${to.y.toFixed(1)}`, "stroke-width": (0.8 + 5.2 * Math.sqrt(part)).toFixed(1), "stroke-opacity": (0.15 + 0.65 * part).toFixed(2) });
    // Its point, two thirds of the way along the curve.
    const t = 0.66;
    const at = (a, b, c) => (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t ** 2 * c;
    const turned = (Math.atan2((1 - t) * (qy - from.y) + t * (to.y - qy), (1 - t) * (qx - from.x) + t * (to.x - qx)) * 180) / Math.PI;
    const size = 5 + 5 * Math.sqrt(part);
    const point = svg("path", { class: "point", d: `M${-size} ${-size * 0.7}L${size} 0L${-size} ${size * 0.7}Z`, transform: `translate(${at(from.x, qx, to.x).toFixed(1)} ${at(from.y, qy, to.y).toFixed(1)}) rotate(${turned.toFixed(1)})`, "fill-opacity": (0.3 + 0.6 * part).toFixed(2) });
    arc.append(svg("title", null, `${names.get(teacher)} taught ${names.get(learner)}: ${number(groups)} groups`));
    return svg("g", { class: "taught", "data-from": teacher, "data-to": learner }, arc, point);
  });
  const marks = shown.map((node) => {
    const { side, x, y } = places.get(node.id);
    const anchor = Math.abs(side) < 0.12 ? "middle" : side > 0 ? "start" : "end";
    const lx = x + (anchor === "middle" ? 0 : Math.sign(side) * 14);
    const ly = anchor === "middle" ? y + (y > cy ? 28 : -16) : y + 4;
    const told = `${names.get(node.id)}: taught ${number(taught.get(node.id) ?? 0)} groups, learned ${number(node.claims?.foreign_used)}, as claimed`;
    const mark = svg("g", { class: `vertex ${node.present ? "" : "gone"}`, tabindex: "0", role: "img", "aria-label": told },
      svg("title", null, told),
      svg("circle", { cx: x, cy: y, r: 8 }),
      svg("text", { x: lx, y: ly, "text-anchor": anchor }, clipped(names.get(node.id), narrow ? 10 : 18)));
    const alone = (on) => {
      for (const arc of arcs) arc.classList.toggle("faint", on && arc.dataset.from !== node.id && arc.dataset.to !== node.id);
    };
    for (const [event, on] of [["pointerenter", true], ["pointerleave", false], ["focus", true], ["blur", false]]) mark.addEventListener(event, () => alone(on));
    return mark;
  });
  find("graph-hint").textContent = edges.length
    ? `As the learners claim: an arc points from teacher to learner, and is the wider the more groups were learned from.${shown.length > FEW ? ` Of each learner, its ${MAIN} main teachers are drawn.` : ""} Point at a node to see its own.`
    : "Arcs appear between teachers and learners once nodes report from whom they learned.";
  const hidden = all.length > shown.length ? el("p", { class: "note" }, `${number(all.length - shown.length)} more are in the table only.`) : null;
  show(find("graph"), svg("svg", { class: "swarm graph", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${shown.length} nodes and ${edges.length} arcs; the table says the same in words.` }, ...arcs, ...marks), hidden);
}


const COLUMNS = [["Node", 0], ["Heard", 0], ["Step", 1], ["Groups", 1], ["Right", 1], ["Version", 0], ["Model", 0], ["pass@1", 1], ["Learned from", 1], ["Sent", 1]];
const SEEN = 6;

function showNodes(nodes, silent) {
  if (!nodes.length) return show(find("nodes"), el("p", { class: "empty" }, "Nodes appear here as soon as something is heard of them."));
  const row = (node) => {
    const claims = node.claims;
    const cells = [
      el("div", null, el("b", null, node.own ? `${name(node)} (this node)` : name(node)), claims?.name ? el("small", null, el("code", { title: node.id }, short(node.id))) : null),
      el("div", null, node.present ? "now" : `${lasting(node.heard)} ago`, el("small", null, node.reach || "")),
      number(node.step),
      number(node.groups),
      percent(node.success),
      node.version || "–",
    ];
    if (claims) cells.push(
      el("div", null, claims.model || "–", el("small", null, claims.tokenizer ? `tokenizer ${claims.tokenizer}` : "")),
      el("div", null, `${two(claims.pass_at_1_before)} → ${two(claims.pass_at_1)}`, spark(node.curve)),
      el("div", null, number(claims.foreign_used), el("small", null, taughtBy(Object.keys(claims.teachers).length))),
      bytes(claims.bytes_out),
    );
    const told = cells.map((cell, index) =>
      el(index ? "td" : "th", { "data-name": `${COLUMNS[index][0]}${index < SEEN ? "" : ", claimed"}`, scope: index ? null : "row", class: COLUMNS[index][1] ? "figure" : null }, cell));
    if (!claims) told.push(el("td", { class: "silent", "data-name": "Claimed", colspan: COLUMNS.length - SEEN }, "nothing: it does not report about itself"));
    return el("tr", { class: node.present ? null : "gone" }, told);
  };
  const over = el("tr", { class: "over" }, el("th", { colspan: SEEN, scope: "colgroup" }, "heard by the observer"), el("th", { colspan: COLUMNS.length - SEEN, scope: "colgroup" }, "claimed by the node"));
  const head = el("tr", null, COLUMNS.map(([title, figure]) => el("th", { scope: "col", class: figure ? "figure" : null }, title)));
  const left = [[nodes.length - ROWS, "more"], [silent, `${silent === 1 ? "other" : "others"} came and went without a group or a report`]].filter(([count]) => count > 0);
  const more = left.map(([count, what]) => el("p", { class: "note" }, `${number(count)} ${what}: in swarm.json.`));
  show(find("nodes"),
    el("table", { class: "peers nodes" }, el("thead", null, over, head), el("tbody", null, nodes.slice(0, ROWS).map(row))),
    el("p", { class: "note" }, "Groups: announced while the observer looked. Right: part of their completions, by the author's own rule. Model, pass@1, learned and sent are claims."), more);
}

const taughtBy = (count) => (count < TEACHERS_TOLD ? `${number(count)} ${count === 1 ? "teacher" : "teachers"}` : `${count} teachers or more`);

/** A node's claimed pass@1 over time, from 0 to 1. */
function spark(rows) {
  const known = rows.filter(([, value]) => value !== null);
  if (known.length < 2) return null;
  const [first, last] = [known[0][0], known.at(-1)[0]];
  const at = ([time, value]) => `${((76 * (time - first)) / Math.max(1, last - first) + 2).toFixed(1)} ${(18 - 16 * value).toFixed(1)}`;
  const broken = breaks(known.map(([time]) => time));
  const d = known.map((row, index) => index && !broken[index] ? `L${at(row)}` : `M${at(row)}h0`).join("");
  return svg("svg", { class: "spark", width: 80, height: 20, "aria-hidden": "true" }, svg("path", { class: "line own", d }));
}

show(find("history"), CHARTS.map((chart) => chart.element));
document.addEventListener("visibilitychange", poll);
addEventListener("resize", () => text && draw(JSON.parse(text)));
go();
