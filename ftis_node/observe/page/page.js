// The page: asks the node every two seconds and shows what it says.

import { Chart, MANY, TIME, recent } from "./charts.js";
import { bytes, el, find, lasting, number, percent, plain, seconds, short, show, who } from "./dom.js";
import { OTHERS, everybody, peersTable, swarmPicture, trafficTable } from "./swarm.js";

const RECENT = 8; // steps, of which the numbers beside the names are means, as the status's `step_seconds` is
const SURE_SECONDS = 2; // an estimate from less says little
const POLL = 2000;
const PATIENCE = 8000;

// A shape for each state beside its colour, which is in page.css.
const MARKS = {
  LOADING: "◌", JOINING: "◌", ALONE: "○", ONLINE: "●", RELAYED: "◐", "OUTBOUND-ONLY": "◐", PAUSED: "‖", DEGRADED: "▲", STOPPING: "■",
};

const REACHED = { direct: "reached directly", relayed: "reached by relays", "outbound-only": "nobody can dial it" };

const two = (value) => number(value, 2);
const counted = (steps) => (steps === 1 ? "step" : `${steps} steps`);
const groups = (value) => number(value, value % 1 ? 1 : 0); // parts of a mean add up
const rate = (value) => bytes(value, "/s");
const SOON = "appears here with the first steps.";
const JOINED = "known once it has joined";

const CHARTS = [
  {
    of: "evaluations", size: "wide", dots: true, title: "pass@1", note: "Greedy, on held-out prompts; the band is the 95\u202f% interval.",
    series: [{ key: "pass_at_1", name: "pass@1", tone: "own" }], band: ["low", "high"], floor: 0, ceiling: 1, format: two,
    empty: "How well the model does on prompts it is not trained on appears here, first before any training.",
  },
  {
    title: "Reward", note: "Mean over a step's completions.", floor: 0, ceiling: 1, format: two, empty: `The reward of own and others' completions ${SOON}`,
    series: [{ key: "own_reward", name: "own", tone: "own" }, { key: "foreign_reward", name: "others'", tone: "foreign" }],
  },
  {
    title: "What became of others' samples", note: "Importance: mean of min(ρ, 2). Filtered: of their samples with Â ≤ 0. Loss share: of Σ |Â|·w·tokens.", floor: 0, ceiling: 1, format: two,
    empty: "Importance weights, filter and weight in the loss appear here once groups of others are trained on.",
    series: [
      { key: "foreign_share", name: "loss share", tone: "own", format: percent },
      { key: "importance", name: "importance", tone: "third" },
      { key: "filtered", name: "filtered", tone: "foreign", format: percent },
    ],
  },
  {
    title: "Groups of a step", note: "Those that it was taken on.", kind: "stack", floor: 0, whole: true, format: groups, empty: "Own groups and those of others appear here with the first steps.",
    series: [{ key: "own_groups", name: "own", tone: "own" }, { key: "foreign_groups", name: "others'", tone: "foreign" }],
  },
  {
    title: "Time of a step", note: "Evaluation is not in it.", kind: "stack", peaks: true, floor: 0, format: seconds, axis: (value, digits) => `${number(value, digits)}\u202fs`,
    empty: `How long generating, waiting and training take ${SOON}`,
    series: [
      { key: "generate", name: "generating", tone: "own" },
      { key: "wait", name: "waiting", tone: "third" },
      { key: "train", name: "training", tone: "foreign" },
    ],
  },
  {
    size: "half", title: "Peers, and groups waiting", note: "Those that are too old do not wait.", floor: 0, whole: true, format: groups, empty: "Peers, and how many groups of theirs wait, appear here with the first steps.",
    series: [{ key: "peers", name: "peers", tone: "own" }, { key: "pool", name: "groups waiting", tone: "foreign" }],
  },
  {
    size: "half", title: "Traffic", peaks: true, floor: 0, whole: true, format: rate, axis: (value) => bytes(value, "/s", 0), empty: `What comes in and goes out ${SOON}`,
    series: [{ key: "in_rate", name: "in", tone: "own" }, { key: "out_rate", name: "out", tone: "foreign" }],
  },
].map((spec) => ({ of: "steps", chart: new Chart(spec), ...spec }));

const latest = { status: {}, peers: {}, history: {}, completions: {} };
const texts = {};
let answered = null;

async function ask(what) {
  const response = await fetch(`/api/${what}`, { signal: AbortSignal.timeout(PATIENCE) });
  if (!response.ok) throw Object.assign(new Error(`The node answered ${response.status}.`), { status: response.status });
  const text = await response.text();
  const changed = texts[what] !== text;
  texts[what] = text;
  if (changed) latest[what] = JSON.parse(text);
  return changed;
}

// A node whose status comes is there: a part that is slow keeps what it showed.
async function askPatiently(what) {
  try {
    return await ask(what);
  } catch (error) {
    if (error.name !== "TimeoutError") throw error;
    return false;
  }
}

async function poll() {
  if (document.hidden) return;
  let changed;
  try {
    changed = await Promise.all([ask("status"), ...["peers", "history", "completions"].map(askPatiently)]);
  } catch (error) {
    return showTrouble(error);
  }
  const [status, peers, history, completions] = changed;
  answered = new Date();
  find("banner").hidden = true;
  document.body.classList.remove("stale");
  if (status) showStatus();
  if (history) showHistory();
  if (status || history) showTiles(latest.status);
  if (status || peers || history) showPeers();
  if (completions || peers) showTexts();
}

/** One round after another, never two at once. */
async function go() {
  try {
    await poll();
  } finally {
    setTimeout(go, POLL);
  }
}

function showTrouble(error) {
  const since = answered ? ` What you see is from ${TIME.long(answered / 1000)}.` : "";
  const told =
    error.status === 401
      ? "This link is no longer valid. Run ftis-node page on the node's machine for a new one."
      : error.status
        ? `${error.message} Its node.log says why.${since}`
        : `The node does not answer: it has ended, or this machine cannot reach it. ftis-node join starts it again.${since}`;
  const banner = find("banner");
  if (banner.textContent !== told) banner.textContent = told; // said once, not every two seconds
  banner.hidden = false;
  document.body.classList.add("stale");
  find("state").className = "state offline";
  find("state").textContent = "✕ NO ANSWER";
  texts.status = null; // so that the state comes back with the node
}

function showStatus() {
  const status = latest.status;
  const name = status.name || "ftis-node";
  find("name").textContent = plain(name);
  const step = "step" in status ? ` · step ${number(status.step)}` : "";
  document.title = `${plain(name)} · ${status.state.toLowerCase()}${step} – ftis-node`;
  const state = find("state");
  state.className = `state ${status.state.toLowerCase()}`;
  state.textContent = `${MARKS[status.state] ?? "●"} ${status.state}`;
  const waiting = status.waiting_for ? ` Waiting for ${status.waiting_for}.` : "";
  const pausing = status.pausing && status.state !== "PAUSED" ? " It pauses after this step." : "";
  const finishing = status.finishing ? " It ends after this step." : "";
  const work = status.doing ? ` ${working(status.doing)}` : "";
  const told = el("span", null, `${status.reason}${waiting}${pausing}${finishing}${work} `);
  show(find("reason"), told, el("span", { class: "advice" }, commands(status.advice ?? "")));
  const id = (status.addresses?.[0] ?? "").split("/p2p/").pop();
  const facts = [
    ["Model", status.kind ? `${status.model} (${status.kind})` : status.model],
    ["Step", number(status.step)],
    ["Run", status.run ? el("code", { title: status.run }, status.run.slice(0, 12)) : "–"],
    ["Node", id ? el("code", { title: id }, short(id)) : "–"],
    ["Up", lasting(status.uptime)],
  ];
  show(find("facts"), facts.map(([term, told]) => el("div", null, el("dt", null, term), el("dd", null, told))));
  showNetwork(status);
}

/** What the compute process does now, in a sentence. */
function working({ what, done, of, unit, tokens, seconds: since, left }) {
  const parts = [];
  if (of !== null) parts.push(`${number(done)} of ${number(of)} ${plain(unit)}`);
  if (tokens && since) parts.push(`${number(Math.round(tokens / since))} tokens a second`);
  if (left !== null && since > SURE_SECONDS) parts.push(`about ${lasting(left)} left`);
  else if (!parts.length) parts.push(lasting(since));
  return `${plain(what[0].toUpperCase() + what.slice(1))}: ${parts.join(", ")}.`;
}

/** A sentence of the node's in which commands stand between backticks. */
const commands = (text) => text.split("`").map((part, index) => (index % 2 ? el("code", null, part) : part));

function showTiles(status) {
  const authors = Object.keys(status.foreign_groups_used ?? {}).filter((name) => name !== OTHERS).length;
  const several = OTHERS in (status.foreign_groups_used ?? {}) ? " and others" : "";
  const foreign = Object.values(status.foreign_groups_used ?? {}).reduce((sum, groups) => sum + groups, 0);
  const begun = "step" in status;
  const gained = status.pass_at_1 - status.pass_at_1_before;
  const sign = gained < 0 ? "−" : "+";
  const again = status.pass_at_1_due == null ? "" : status.pass_at_1_due < 1 ? "; again soon" : `; again in ${lasting(status.pass_at_1_due)}`;
  const measured = typeof status.pass_at_1 === "number";
  const trained = latest.history.evaluations?.step?.at(-1) > 0;
  const change = trained ? `; ${two(status.pass_at_1_before)} before, ${sign}${two(Math.abs(gained))}` : "; before any training";
  const own = ownShare();
  const columns = latest.history.steps ?? {};
  const lasts = ["generate", "wait", "train"].reduce((sum, part) => sum + recent(columns[part], newest()), 0);
  const steps = Math.min(status.step, newest() * (latest.history.joined ?? 1));
  const tiles = [
    ["pass@1", two(status.pass_at_1), measured ? `${sureness()}${change}${again}` : begun ? "soon, before any training" : JOINED],
    ["Own groups", begun ? number(status.own_groups_used) : "–", "generated and used"],
    ["Others' groups", begun ? number(foreign) : "–", authors ? `used, of ${authors} author${authors === 1 ? "" : "s"}${several}` : begun ? "none used yet" : JOINED],
    ["Others' loss share", own === null ? "–" : percent(1 - own), "of Σ |Â|·w·tokens, over this training"],
    ["Received", begun ? bytes(status.bytes_in) : "–", `${begun ? bytes(status.bytes_out) : "–"} sent, since this start`],
    ["Peers", number(status.peers), status.network ? REACHED[status.network.reachability] : "none yet"],
    ["A step takes", lasts ? seconds(lasts) : "–", lasts ? `mean of the last ${counted(steps)}` : "appears with the first step"],
  ];
  show(find("tiles"), tiles.map(([label, value, sub]) =>
    el("li", { class: "tile" }, el("span", { class: "label" }, label), el("strong", null, value), el("span", { class: "sub" }, sub))));
}

/** The 95 % interval of the latest pass@1. */
function sureness() {
  const { low, high } = latest.history.evaluations ?? {};
  return low?.length ? `95\u202f%: ${two(low.at(-1))} to ${two(high.at(-1))}` : "";
}

/** How many points of the curves are the last `RECENT` steps, at least. */
const newest = () => Math.ceil(RECENT / (latest.history.joined ?? 1));

/** The part of the loss that own samples had in the whole training; null before there is one. */
const ownShare = () => (latest.status.step ? 1 - latest.status.foreign_weight_share : null);

function counts(of) {
  const told = Object.entries(of ?? {}).filter(([, count]) => count).map(([name, count]) => `${name.replaceAll("_", " ")} ${number(count)}`);
  return told.length ? told.join(", ") : "none";
}

function gpu({ utilization, used_bytes: used, total_bytes: total }) {
  const busy = utilization == null ? "" : `${Math.round(100 * utilization)} % busy, `;
  return `${busy}${bytes(used)} of ${bytes(total)}`;
}

function clockBeside(clock) {
  if (!clock) return "–";
  const peers = `${number(clock.peers)} ${clock.peers === 1 ? "peer" : "peers"}`;
  if (Math.abs(clock.behind) < 60) return `agrees with ${peers}`;
  return `${lasting(Math.abs(clock.behind))} ${clock.behind > 0 ? "behind" : "ahead of"} ${peers}`;
}

function memory({ process, worker_memory_bytes: compute, network }) {
  const known = [["network", process?.memory_bytes], ["compute", compute], ["p2pd", network?.p2pd?.memory_bytes]].filter(([, size]) => size != null);
  return known.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") || "–";
}

function saved(checkpoint) {
  if (checkpoint?.step == null) return checkpoint ? "nothing yet" : "–";
  const due = checkpoint.due_seconds == null ? "" : `, next in ${lasting(checkpoint.due_seconds)}`;
  return `step ${number(checkpoint.step)}, ${lasting(checkpoint.age_seconds)} ago${due}`;
}

function showNetwork(status) {
  const rows = [
    ["Addresses", status.addresses?.length ? status.addresses.map((address) => el("code", null, address)) : "none yet"],
    ["Reachability", status.network?.reachability ?? "–"],
    ["Packets refused", counts(status.refused_packets)],
    ["Own groups refused", number(status.own_groups_refused)],
    ["Announcements", counts(status.announcements)],
    ["Others' groups now", status.pool ? counts(status.pool) : "–"],
    ["Clock", clockBeside(status.network?.clock)],
    ["Saved", saved(status.checkpoint)],
    ["Restarts", `compute process ${number(status.worker_restarts)}, p2pd ${number(status.network?.p2pd_restarts)}`],
    ["Memory", memory(status)],
    ...(status.gpu ? [["GPU", gpu(status.gpu)]] : []),
  ];
  show(find("network"), el("h3", null, "Network"),
    el("dl", { class: "rows" }, rows.map(([term, told]) => el("div", null, el("dt", null, term), el("dd", null, told)))));
}

function showHistory() {
  const { steps = {}, joined = 1 } = latest.history;
  for (const { of, chart } of CHARTS) chart.update(latest.history[of], of === "steps" ? newest() : 1);
  const beside = ` A number beside a name is the mean of the last ${newest() * joined} steps; pass@1 is the latest.`;
  const points = joined > 1 ? ` A point is the mean of ${joined} steps.` : "";
  const through = steps.step?.length > MANY ? " The plain line is a mean of the points around, which are faint." : "";
  const before = (steps.step?.[0] ?? 0) - joined;
  const cut = before > 0 ? ` The log of the steps up to ${number(before)} is gone, for it outgrew its part of the disk.` : "";
  find("joined").textContent = `By step.${points}${through}${beside}${cut} Point at a curve, or focus it and use the arrow keys, to read values.`;
}

function showPeers() {
  const peers = everybody(latest.peers, latest.status, latest.history.teachers);
  show(find("peers"), peersTable(peers, ownShare()));
  show(find("swarm"), swarmPicture(peers, latest.status.name));
  show(find("traffic"), trafficTable(peers, latest.status));
}

function showTexts() {
  const groups = latest.completions.groups ?? [];
  const own = groups.filter((group) => group.author === null);
  const foreign = groups.filter((group) => group.author !== null);
  const none = (what) => el("p", { class: "empty card" }, what);
  show(find("texts-own"), own.length ? own.map(groupCard) : none("What this node's model writes appears here once a step has used groups of its own."));
  show(find("texts-foreign"), foreign.length ? foreign.map(groupCard) : none("What other nodes' models write appears here once a step has used groups of theirs."));
}

/** Equal completions once, with how many there are; the most frequent first. */
function together(completions) {
  const found = new Map();
  for (const one of completions) {
    const key = JSON.stringify([one.text, one.reward, one.finished]);
    found.set(key, { ...one, times: (found.get(key)?.times ?? 0) + 1 });
  }
  return [...found.values()].sort((one, other) => other.times - one.times);
}

function groupCard(group) {
  const by = group.author === null ? "this node" : who(group.author, latest.peers.names);
  const right = group.completions.filter(({ reward }) => reward >= 1).length;
  const sample = ({ text, reward, tokens, finished, columns, times }) =>
    el("li", { class: reward >= 1 ? "right" : "wrong" },
      el("span", { class: "reward" }, `${reward >= 1 ? "✓" : reward > 0 ? "~" : "✗"} ${number(reward, Number.isInteger(reward) ? 0 : 2)}`),
      el("span", { class: "text", dir: "auto" }, text || "(nothing)"),
      el("small", null, `${times > 1 ? `${times} alike, ` : ""}${number(tokens)}\u202ftokens${finished ? "" : ", not finished"}`),
      Object.entries(columns ?? {}).map(([name, value]) => el("small", { dir: "auto" }, `${name}: ${value}`)));
  return el("article", { class: "card group" },
    el("header", null,
      el("p", { class: "question", dir: "auto" }, group.question),
      el("p", { class: "meta" }, "answer ", el("b", { dir: "auto" }, group.answer), ` · ${right} of ${group.completions.length} right · step ${number(group.step)} · by `, by)),
    el("ol", { tabindex: "0", "aria-label": "Completions" }, together(group.completions).map(sample)));
}

show(find("curves"), CHARTS.map(({ chart }) => chart.element));
showPeers();
showTexts();
document.addEventListener("visibilitychange", poll);
go();
