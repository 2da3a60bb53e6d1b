// The swarm as a picture, and its table: this node and whom it learns from.

import { bytes, called, clipped, el, number, percent, short, svg, who } from "./dom.js";

export const OTHERS = "others";
const MOST = 10; // peers in the picture
const NAME = 12; // letters of a name there
const ROWS = 100; // and in the table
const STRANGERS = 8; // that were left out and never used, of those: identities are free, and there may be a thousand

/** What is thought of a peer: its class for colour and line, a mark that needs no colour, and the reason. */
export function standing(peer) {
  const words = peer.standing ?? "";
  if (peer.left_out !== undefined) return { tone: "banned", mark: "✕", word: "left out", reason: peer.left_out };
  if (peer.id === OTHERS) return { tone: "gone", mark: "…", word: "several", reason: "Those of whom least was used, counted together." };
  if (peer.gone) return { tone: "gone", mark: "○", word: "not here now", reason: "It is not among this node's peers at present." };
  if (words.startsWith("banned")) return { tone: "banned", mark: "✕", word: "banned", reason: after(words) };
  if (words.startsWith("doubted")) return { tone: "doubted", mark: "▲", word: "doubted", reason: after(words) };
  if (words === "established") {
    return { tone: "established", mark: "●", word: "established", reason: `${number(peer.record)} groups with sound claims.` };
  }
  const reason = `${number(peer.record)} groups with sound claims so far; newcomers share a quarter of each batch.`;
  return { tone: "newcomer", mark: "◆", word: "newcomer", reason };
}

const after = (words) => words.slice(words.indexOf(":") + 1).trim() || words;

/** Everybody there is something to tell of: peers, those left out, and authors who are not here any more. */
export function everybody(report, status, teachers) {
  const names = report.names ?? {};
  const used = status.foreign_groups_used ?? {};
  const known = new Map((report.peers ?? []).map((peer) => [peer.id, { ...peer }]));
  for (const { id, reason } of report.left_out ?? []) known.set(id, { ...(known.get(id) ?? { id }), left_out: reason });
  for (const id of Object.keys(used)) if (!known.has(id)) known.set(id, { id, gone: true });
  // The log tells how others' part of the loss is divided; what that part is, the status knows, also of steps that are no longer in the log.
  const theirs = Object.entries(teachers ?? {}).reduce((sum, [name, book]) => sum + (name === "own" ? 0 : book.loss_weight ?? 0), 0);
  const part = status.foreign_weight_share ?? null;
  for (const peer of known.values()) {
    peer.called = called(peer.id, names);
    peer.who = () => who(peer.id, names);
    peer.used = used[peer.id] ?? peer.used ?? 0;
    peer.share = theirs && part !== null && teachers[peer.id] ? (part * teachers[peer.id].loss_weight) / theirs : null;
    peer.dropped = teachers?.[peer.id]?.negatives ? teachers[peer.id].filtered / teachers[peer.id].negatives : null;
  }
  const away = (peer) => (peer.left_out === undefined ? 0 : 1); // identities are free: they must not displace those who are here
  return [...known.values()].sort((one, other) => other.used - one.used || away(one) - away(other) || (one.id < other.id ? -1 : 1));
}

const COLUMNS = ["Peer", "Standing", "Accepted", "Used", "Loss share", "Reward", "Importance", "Filtered"];

export function peersTable(peers, own) {
  if (!peers.length) {
    return el("p", { class: "empty" }, "No peers yet. Who this node learns from appears here, with what came of it.");
  }
  const row = (peer) => {
    const thought = standing(peer);
    const bar = peer.share ? el("i") : null;
    if (bar) bar.style.width = `${Math.round(60 * peer.share)}px`;
    const share = el("span", { class: "bar" }, bar, el("span", null, percent(peer.share)));
    const cells = [
      el("div", null, peer.who(), el("small", null, [peer.called === short(peer.id) ? null : short(peer.id), peer.agent].filter(Boolean).join(" · "))),
      el("div", null, el("span", { class: `badge ${thought.tone}` }, `${thought.mark} ${thought.word}`), el("small", null, thought.reason)),
      number(peer.accepted),
      number(peer.used),
      share,
      number(peer.mean_reward, 2),
      number(peer.mean_importance, 2),
      percent(peer.dropped),
    ];
    return el("tr", null, cells.map((cell, index) =>
      el(index ? "td" : "th", { "data-name": COLUMNS[index], scope: index ? null : "row", class: index > 1 ? "figure" : null }, cell)));
  };
  const head = COLUMNS.map((name, index) => el("th", { scope: "col", class: index > 1 ? "figure" : null }, name));
  const told =
    "Groups: accepted since this start, used over this training. Loss share: its part of Σ |Â|·w·tokens over this training" +
    (own === null ? "." : `, of which this node's own samples have ${percent(own)}.`) +
    " Importance: mean of min(ρ, 2), at most 1 where claims are honest, up to chance. Filtered: of its samples with Â ≤ 0.";
  let strangers = 0;
  const shown = peers.filter((peer) => peer.left_out === undefined || peer.used || ++strangers <= STRANGERS).slice(0, ROWS);
  const more = peers.length > shown.length ? ` ${number(peers.length - shown.length)} more: ftis-node peers shows all.` : "";
  return [el("table", { class: "peers" }, el("thead", null, el("tr", null, head)), el("tbody", null, shown.map(row))), el("p", { class: "note" }, told + more)];
}

/** This node in the middle, peers around it; a line is the wider the more of its groups were used. */
export function swarmPicture(peers, name) {
  const width = 420;
  const height = 320;
  const shown = peers.slice(0, MOST);
  const most = Math.max(1, ...shown.map((peer) => peer.used));
  const [cx, cy] = [width / 2, height / 2];
  const lines = [];
  const nodes = [];
  shown.forEach((peer, index) => {
    const angle = -Math.PI / 2 + (2 * Math.PI * (index + (shown.length === 2 ? 0.25 : 0))) / shown.length;
    const [x, y] = [cx + 116 * Math.cos(angle), cy + 108 * Math.sin(angle)];
    const thought = standing(peer);
    const thick = peer.used ? 1.5 + 8.5 * Math.sqrt(peer.used / most) : 1;
    lines.push(svg("line", { class: `edge ${thought.tone}`, x1: cx, y1: cy, x2: x, y2: y, "stroke-width": thick.toFixed(1) }));
    const side = Math.cos(angle);
    const anchor = side > 0.3 ? "start" : side < -0.3 ? "end" : "middle";
    const lx = x + (anchor === "middle" ? 0 : Math.sign(side) * 20);
    const ly = anchor === "middle" ? y + (Math.sin(angle) > 0 ? 31 : -34) : y - 3;
    nodes.push(
      svg("g", null,
        svg("title", null, `${peer.called} (${peer.id}): ${thought.word}, ${number(peer.used)} groups used. ${thought.reason}`),
        svg("circle", { class: `peer ${thought.tone}`, cx: x, cy: y, r: 14 }),
        svg("text", { class: "mark", x, y: y + 4.5, "text-anchor": "middle" }, thought.mark),
        svg("text", { class: "label", x: lx, y: ly, "text-anchor": anchor }, clipped(peer.called, NAME)),
        svg("text", { class: "sub", x: lx, y: ly + 16, "text-anchor": anchor }, `${number(peer.used)} used`),
      ),
    );
  });
  const me = svg("g", null,
    svg("circle", { class: "me", cx, cy, r: 26 }),
    svg("text", { class: "me-text", x: cx, y: cy + 4.5, "text-anchor": "middle" }, name && name.length <= 4 ? name : "me"));
  const told = peers.length ? `This node and ${peers.length === 1 ? "one other" : `${peers.length} others`}; the table beside says the same in words.` : "This node, alone.";
  const picture = svg("svg", { class: "swarm", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told }, ...lines, ...nodes, me);
  const tones = [...new Map(shown.map((peer) => [standing(peer).word, standing(peer)])).values()];
  const key = tones.map(({ tone, mark, word }) => el("li", null, el("span", { class: `badge ${tone}` }, `${mark} ${word}`)));
  const hidden = peers.length > MOST ? ` ${number(peers.length - MOST)} more are not drawn.` : "";
  const note = peers.length
    ? `The wider a line, the more of its groups were used.${hidden}`
    : "Peers will stand around this node, with lines as wide as what was learned from them.";
  return [el("h3", null, "The swarm as this node sees it"), picture, el("ul", { class: "legend" }, key), el("p", { class: "note" }, note)];
}

export function trafficTable(peers, status) {
  const told = peers.filter((peer) => peer.bytes_in || peer.bytes_out);
  const rows = told.map((peer) =>
    el("tr", null, el("th", { scope: "row" }, peer.who()),
      el("td", { class: "figure" }, bytes(peer.bytes_in)), el("td", { class: "figure" }, bytes(peer.bytes_out)),
      el("td", { class: "figure", title: "whoever made them" }, number(peer.delivered)), el("td", { class: "figure" }, number(peer.fetch_failures))));
  const sum = el("tr", { class: "sum" }, el("th", { scope: "row" }, "All"),
    el("td", { class: "figure" }, bytes(status.bytes_in)), el("td", { class: "figure" }, bytes(status.bytes_out)), el("td"), el("td"));
  const head = ["Peer", "In", "Out", "Brought", "Failed"].map((name, index) =>
    el("th", { scope: "col", class: index ? "figure" : null }, name));
  const empty = rows.length ? null : el("p", { class: "empty" }, "Nothing was exchanged yet. What goes to each peer and comes from it appears here.");
  return [el("h3", null, "Bytes by peer"), empty ?? el("table", { class: "plain" }, el("thead", null, el("tr", null, head)), el("tbody", null, rows, sum))];
}
