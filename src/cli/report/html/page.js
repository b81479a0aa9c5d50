(() => {
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (tag, props = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
};
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// As the command writes them.
const size = bytes => {
  if (bytes < 1024) return `${bytes} B`;
  let value = bytes / 1024, unit = 0;
  while (value >= 1023.95 && unit < 3) { value /= 1024; unit++; }
  return `${value.toFixed(1)} ${["KiB", "MiB", "GiB", "TiB"][unit]}`;
};
const time = s => s < 0.0005 ? "0 s" : s < 0.1 ? `${Math.round(s * 1000)} ms` : s < 100 ? `${s.toFixed(s < 10 ? 2 : 1)} s` : s < 6000 ? `${(s / 60).toFixed(1)} min` : `${(s / 3600).toFixed(1)} h`;
const percent = (part, whole) => whole > 0 ? `${(part / whole * 100).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "0 %";

const expand = (runs, length) => {
  const values = new Array(length).fill(0);
  for (let i = 0, at = 0; i < runs.length; i += 2) { values.fill(runs[i], at, at + runs[i + 1]); at += runs[i + 1]; }
  return values;
};
const lengths = new Map();
const points = line => {
  if (!lengths.has(line)) lengths.set(line, expand(line, data.points));
  return lengths.get(line);
};
const add = (sum, values) => { for (let i = 0; i < values.length; i++) sum[i] += values[i]; return sum; };
const zeros = length => new Array(length).fill(0);

const processes = data.processes;
const several = processes.length > 1;
const labelOf = index => (processes.find(one => one.index === index) || { label: "another process" }).label;
const placeColour = name => {
  const gpu = /^gpu(\d+)$/.exec(name);
  if (gpu) return colour(`--gpu${gpu[1] % 8}`);
  return colour(name.startsWith("host") ? "--host" : name === "near" ? "--near" : name === "peers" ? "--peers" : "--other");
};
const countedColour = index => index < 8 ? colour(`--gpu${index}`) : colour("--other");
const placeOrder = (one, other) => {
  const rank = name => { const gpu = /^gpu(\d+)$/.exec(name); return gpu ? Number(gpu[1]) : name === "near" ? -2 : name === "peers" ? -1 : 1e6; };
  return rank(one) - rank(other) || (one < other ? -1 : one > other ? 1 : 0);
};

// ---- what is shown ------------------------------------------------------------------------------------------------
const state = { who: "all", by: "place", moment: data.moments - 1, peak: false, root: null };
const chosen = () => state.who === "all" ? processes : processes.filter(one => String(one.index) === state.who);

const sums = (all, pick) => {
  const byName = new Map();
  for (const one of all) for (const line of pick(one)) {
    if (!byName.has(line.name)) byName.set(line.name, zeros(data.points));
    add(byName.get(line.name), points(line.line));
  }
  return [...byName].sort((a, b) => placeOrder(a[0], b[0]));
};
const total = one => one.used.reduce((sum, line) => add(sum, points(line.line)), zeros(data.points));
const named = all => data.names.filter(name => all.some(one => one.index === name.process));
const views = {
  place: ["place", all => sums(all, one => one.used).map(([name, values]) => ({ name, values, colour: placeColour(name) }))],
  process: ["process", all => all.map((one, i) => ({ name: one.label, values: total(one), colour: countedColour(i) }))],
  residence: ["near and far", all => sums(all, one => one.residence).map(([name, values]) => ({ name: { near: "near", peers: "on other GPUs", host: "on the host" }[name] || name, values, colour: placeColour(name) }))],
  label: ["label", all => {
    const names = named(all);
    const several = new Set(names.map(name => name.process)).size > 1;
    const lines = names.map((name, i) => ({ name: several ? `${name.name} (${labelOf(name.process)})` : name.name, values: points(name.line), colour: countedColour(i) }));
    const rest = all.reduce((sum, one) => add(sum, total(one)), zeros(data.points));
    for (const line of lines) for (let i = 0; i < rest.length; i++) rest[i] = Math.max(0, rest[i] - line.values[i]);
    return [...lines, { name: "without a label", values: rest, colour: colour("--other") }];
  }],
  held: ["place, held by the pool", all => sums(all, one => one.held).map(([name, values]) => ({ name, values, colour: placeColour(name) }))],
};
const offered = all => Object.keys(views).filter(by => by === "place" || (by === "process" && several)
  || (by === "residence" && all.some(one => one.residence.length)) || (by === "label" && named(all).length)
  || (by === "held" && all.some(one => one.held.length)));

// ---- plots --------------------------------------------------------------------------------------------------------
const step = data.end / data.points;
const xs = Array.from({ length: data.points + 1 }, (_, i) => i * step);
const closed = values => [...values, values[values.length - 1]];
const powers = Array.from({ length: 60 }, (_, i) => 2 ** i);
const seconds = [...[-3, -2, -1, 0].flatMap(power => [1, 2, 5].map(one => one * 10 ** power)), 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5, 1e6].map(days => days * 86400)];
const two = number => String(Math.floor(number)).padStart(2, "0");
// All of an axis in one form: 0.5 s, or 1:30, or 2:05:00.
const clock = (_, splits) => {
  const step = splits.length > 1 ? splits[1] - splits[0] : 1, last = splits[splits.length - 1];
  if (last < 120) return splits.map(s => `${s.toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : step < 1 ? 1 : 0)} s`);
  return splits.map(s => last < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(s / 60 % 60)}:${two(s % 60)}`);
};
const axes = () => {
  const look = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
  return [{ ...look, incrs: seconds, space: 70, values: clock }, { ...look, size: 78, incrs: powers, values: (_, splits) => splits.map(size) }];
};
const momentLine = {
  hooks: { draw: u => {
    if (u.root.closest("#plot") === null) return;
    const x = u.valToPos(momentTime(), "x", true), { top, height, left, width } = u.bbox;
    if (x < left || x > left + width) return;
    u.ctx.save();
    u.ctx.strokeStyle = colour("--ink");
    u.ctx.setLineDash([4, 3]);
    u.ctx.beginPath(); u.ctx.moveTo(x, top); u.ctx.lineTo(x, top + height); u.ctx.stroke();
    u.ctx.restore();
  } },
};
const draw = (box, lines, stacked, height) => {
  box.replaceChildren();
  const raw = lines.map(line => closed(line.values));
  const stack = u => {
    const shown = i => !u || u.series[i + 1].show;
    let below = zeros(data.points + 1), before = 0;
    const bands = [];
    const values = raw.map((values, i) => {
      if (!stacked) return values;
      if (!shown(i)) return values;
      below = values.map((value, at) => value + below[at]);
      if (before) bands.push({ series: [i + 1, before], dir: -1 });
      before = i + 1;
      return below;
    });
    return [[xs, ...values], bands];
  };
  const [values, bands] = stack(null);
  // From the top line down, each is filled to the one below it.
  const series = lines.map((line, i) => ({
    label: line.name, stroke: line.colour, width: stacked ? 1 : 2, fill: stacked ? `color-mix(in srgb, ${line.colour}, transparent 35%)` : undefined,
    points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }),
    value: (u, _, __, at) => size(at === null || at === undefined ? Math.max(...line.values, 0) : raw[i][at]),
  }));
  const plot = new uPlot({
    width: Math.max(300, box.clientWidth - 16), height, axes: axes(), scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high, 1) * 1.05] } },
    series: [{ label: "at", value: (_, value) => value === null || value === undefined ? "most" : time(value) }, ...series], bands,
    legend: { live: true }, plugins: [momentLine], cursor: { drag: { x: true, y: false } },
    hooks: { setSeries: [(u, index, options) => {
      if (!stacked || options.show === undefined) return;
      const [values, bands] = stack(u);
      u.delBand(null);
      bands.forEach(band => u.addBand(band));
      u.setData(values, false);
      u.redraw();
    }] },
  }, values, box);
  return plot;
};
let main = null;
const drawMemory = () => {
  const all = chosen();
  const by = offered(all);
  if (!by.includes(state.by)) state.by = "place";
  $("by").replaceChildren(...by.map(name => make("option", { value: name, textContent: views[name][0], selected: name === state.by })));
  const lines = views[state.by][1](all).filter(line => line.values.some(value => value > 0));
  const box = $("plot");
  if (main) { main.destroy(); main = null; }
  if (!lines.length) { box.replaceChildren(make("p", { className: "quiet", textContent: "No level of the pool is in the log: nothing was taken from it, or GPUPOOL_LOG left that out." })); return; }
  main = draw(box, lines, true, 320);
  let pressed = 0;
  main.over.addEventListener("mousedown", event => { pressed = event.clientX; });
  main.over.addEventListener("click", event => {
    if (Math.abs(event.clientX - pressed) > 3) return;
    setMoment(Math.floor(main.posToVal(event.clientX - main.over.getBoundingClientRect().left, "x") / data.end * data.moments));
  });
};
const zoom = (factor, shift) => {
  if (!main) return;
  const { min, max } = main.scales.x, half = (max - min) / 2 * factor, middle = (min + max) / 2 + (max - min) * shift;
  const width = Math.min(half * 2, data.end), low = Math.min(Math.max(0, middle - half), data.end - width);
  main.setScale("x", { min: low, max: low + Math.max(width, step * 4) });
};
const whole = () => main && main.setScale("x", { min: 0, max: data.end });
const drawSmall = (id, pick) => {
  const lines = [];
  for (const one of processes) for (const line of pick(one)) {
    lines.push({ name: several ? `${line.name} (${one.label})` : line.name, values: points(line.line), colour: countedColour(lines.length) });
  }
  const box = $(id);
  box.hidden = !lines.length;
  if (lines.length) draw(box, lines.slice(0, 12), false, 180);
};

// ---- who holds what -----------------------------------------------------------------------------------------------
const momentTime = () => {
  if (state.peak) { const one = peakOf(); if (one) return one.peak_at; }
  return (state.moment + 1) / data.moments * data.end;
};
const peakOf = () => {
  const most = chosen().filter(one => one.peak > 0).sort((a, b) => b.peak - a.peak)[0];
  if (most) return most;
  // Without blocks, by the lines.
  let best = null;
  for (const one of chosen()) {
    const all = total(one), peak = Math.max(...all, 0);
    if (peak > 0 && (!best || peak > best.peak)) best = { peak, peak_at: (all.indexOf(peak) + 1) * step, index: one.index };
  }
  return best;
};
const holderLines = data.holders.list.map(holder => ({ ...holder, values: expand(holder.line, data.moments), elsewhere: expand(holder.far, data.moments) }));
const pointAt = () => Math.max(0, Math.min(data.points - 1, Math.ceil(momentTime() / step) - 1));
// [path of names, bytes, bytes elsewhere], the largest first.
const held = () => {
  const known = new Set(holderLines.map(holder => holder.process));
  const of = new Set(chosen().map(one => one.index));
  const rows = [];
  for (const holder of holderLines) {
    if (!of.has(holder.process)) continue;
    const [bytes, far] = state.peak ? holder.at_peak : [holder.values[state.moment], holder.elsewhere[state.moment]];
    if (bytes > 0) rows.push({ process: holder.process, label: holder.label, frames: holder.frames.map(frame => data.holders.frames[frame]), bytes, far });
  }
  const at = pointAt();
  for (const one of chosen()) {
    if (known.has(one.index)) continue;
    let rest = total(one)[at];
    for (const name of data.names) if (name.process === one.index) {
      const bytes = points(name.line)[at];
      rest -= bytes;
      if (bytes > 0) rows.push({ process: one.index, label: name.name, frames: [], bytes, far: 0 });
    }
    if (rest > 0) rows.push({ process: one.index, label: null, frames: [], bytes: rest, far: 0 });
  }
  return rows.sort((a, b) => b.bytes - a.bytes);
};
const tree = rows => {
  const root = { name: "all", bytes: 0, far: 0, children: new Map(), parent: null };
  for (const row of rows) {
    const path = [];
    if (several) path.push(labelOf(row.process));
    if (row.label !== null) path.push(`“${row.label}”`);
    path.push(...(row.frames.length ? row.frames : row.label === null ? ["a place that is not known"] : []));
    let node = root;
    node.bytes += row.bytes; node.far += row.far;
    for (const name of path) {
      if (!node.children.has(name)) node.children.set(name, { name, bytes: 0, far: 0, children: new Map(), parent: node });
      node = node.children.get(name);
      node.bytes += row.bytes; node.far += row.far;
    }
  }
  return root;
};
// The function first, as that is what is looked for; the tip has the whole path.
const base = path => path.slice(path.lastIndexOf("/") + 1);
const short = name => {
  const python = /^(.*):(\d+) in (.*)$/.exec(name), native = /^(.*) in (.*)\+0x[0-9a-f]+$/.exec(name);
  return python ? `${python[3]}  ${base(python[1])}:${python[2]}` : native ? `${native[1]}  ${base(native[2])}` : name.startsWith("/") ? base(name) : name;
};
const hue = name => { let hash = 7; for (const c of name) hash = (hash * 31 + c.codePointAt(0)) >>> 0; return hash % 360; };
const pathOf = node => { const path = []; for (; node.parent; node = node.parent) path.unshift(node.name); return path; };
const ROW = 22;
let focusFlame = false;
const drawFlame = () => {
  const rows = held(), root = tree(rows), box = $("flame");
  let node = root;
  for (const name of state.root || []) { if (!node.children.has(name)) break; node = node.children.get(name); }
  state.root = pathOf(node);
  box.replaceChildren();
  let depth = 0, deepest = 0;
  const width = Math.max(300, box.clientWidth);
  const place = (node, left, part, depth, above) => {
    deepest = Math.max(deepest, depth);
    const text = `${short(node.name)}  ${size(node.bytes)}`;
    const item = make("button", { className: above ? "frame above" : "frame", type: "button", tabIndex: -1 });
    item.append(text);
    item.setAttribute("role", "treeitem");
    item.setAttribute("aria-level", depth + 1);
    item.setAttribute("aria-label", `${node.name}: ${size(node.bytes)}, ${size(node.far)} of it elsewhere`);
    item.style.left = `${left * 100}%`;
    item.style.width = `${part * 100}%`;
    item.style.top = `${depth * ROW}px`;
    item.style.background = node.parent ? `hsl(${hue(node.name)} ${colour("--sat")} ${colour("--lit")})` : colour("--line");
    if (node.far > 0) { const far = make("i", { className: "far" }); far.style.width = `${node.far / node.bytes * 100}%`; item.append(far); }
    item.node = node;
    item.tip = `${node.name}\n${size(node.bytes)}, ${percent(node.bytes, root.bytes)} of all${node.far ? `\n${size(node.far)} of it on another GPU or the host` : ""}`;
    item.addEventListener("click", () => { state.root = pathOf(node); focusFlame = true; drawFlame(); });
    box.append(item);
    return item;
  };
  const line = [];
  for (let at = node.parent; at; at = at.parent) line.unshift(at);
  for (const above of line) place(above, 0, 1, depth++, true);
  const walk = (node, left, part, depth) => {
    place(node, left, part, depth, false);
    let at = left;
    for (const child of [...node.children.values()].sort((a, b) => b.bytes - a.bytes)) {
      const own = part * child.bytes / node.bytes;
      if (own * width >= 1.5) walk(child, at, own, depth + 1);
      at += own;
    }
  };
  if (root.bytes > 0) walk(node, 0, 1, depth);
  box.style.height = `${(deepest + 1) * ROW + (root.bytes > 0 ? 0 : 10)}px`;
  const own = [...box.children].find(item => item.node === node);
  if (own) { own.tabIndex = 0; if (focusFlame) own.focus(); }
  focusFlame = false;
  const words = [];
  if (!root.bytes) words.push("Nothing was held at this moment.");
  else if (root.far) words.push(`${size(root.far)} of ${size(root.bytes)} lay on another GPU than the one that asked for it, or on the host: the strip below a frame is that part of it.`);
  if (chosen().some(one => one.index !== null && !holderLines.some(holder => holder.process === one.index)) && root.bytes) {
    words.push("Without a line for each block in the log it is not known which calls hold it: GPUPOOL_LOG=info,gpupool::memory=debug has them." +
      ($("grown") ? " The lines that the pool grew for are under “The rest”." : ""));
  }
  $("flame-words").textContent = words.join(" ");
  const when = state.peak ? (holderLines.length && chosen().length > 1 ? "each process at its peak" : `at the peak, ${time(momentTime())}`) : `at ${time(momentTime())}`;
  $("held-at").textContent = when;
  $("at").textContent = state.peak ? "of the peak" : time(momentTime());
  const caller = row => row.frames.slice(-3).reverse().map(short).join(" ← ") || (row.label !== null ? "" : "a place that is not known");
  $("top").tBodies[0].replaceChildren(...rows.slice(0, 10).map(row => make("tr", {},
    make("td", { textContent: labelOf(row.process) }), make("td", { className: "r", textContent: size(row.bytes) }),
    make("td", { className: "r", textContent: row.far ? size(row.far) : "" }),
    make("td", {}, ...(row.label !== null ? [make("b", { textContent: `“${row.label}” ` })] : []), make("code", { textContent: caller(row), title: row.frames.join("\n") })))));
};
$("flame").addEventListener("keydown", event => {
  const item = event.target.closest(".frame");
  if (!item) return;
  const box = $("flame"), items = [...box.children], of = node => items.find(item => item.node === node);
  const siblings = item.node.parent ? items.filter(other => other.node.parent === item.node.parent) : [item];
  const to = {
    ArrowUp: () => of(item.node.parent), ArrowDown: () => items.find(other => other.node.parent === item.node),
    ArrowLeft: () => siblings[siblings.indexOf(item) - 1], ArrowRight: () => siblings[siblings.indexOf(item) + 1],
  }[event.key];
  if (to) {
    const next = to();
    if (next) { items.forEach(item => { item.tabIndex = -1; }); next.tabIndex = 0; next.focus(); next.scrollIntoView({ block: "nearest" }); }
    event.preventDefault();
  } else if (event.key === "Escape") { state.root = null; focusFlame = true; drawFlame(); }
});

// ---- the map ------------------------------------------------------------------------------------------------------
const CELL = 9;
const drawMaps = () => {
  const box = $("maps"), now = momentTime(), maps = data.maps || [];
  const shown = maps.filter(map => chosen().some(one => one.index === map.process));
  if (!shown.length) {
    box.replaceChildren(make("p", { className: "quiet", textContent: "The log does not say where chunks lie: GPUPOOL_LOG=info,gpupool::memory=debug has them." }));
    $("mapped-at").textContent = "";
    return;
  }
  $("mapped-at").textContent = "";
  box.replaceChildren(...shown.map(map => {
    const moment = map.moments.filter(moment => moment.at <= now + 1e-9).pop() || map.moments[0];
    const figure = make("figure"), caption = make("figcaption"), canvas = make("canvas");
    caption.append(make("b", { textContent: several ? labelOf(map.process) : "" }), make("span", { className: "quiet", textContent: `at ${time(moment.at)}, one square is ${size(moment.cell)}` }));
    moment.places.filter(place => place.held).forEach(place => {
      const key = make("span", { className: "key" });
      key.style.background = placeColour(place.place);
      caption.append(make("span", {}, key, `${place.place} ${size(place.used)} of ${size(place.held)} in use${place.holes ? `, ${place.holes} free ${place.holes === 1 ? "piece" : "pieces"}, the largest ${size(place.largest)}` : ""}`));
    });
    figure.append(caption, canvas);
    const cells = [];
    for (let i = 0; i < moment.cells.length; i += 3) for (let n = 0; n < moment.cells[i + 2]; n++) cells.push([moment.cells[i], moment.cells[i + 1]]);
    const columns = Math.max(8, Math.floor((box.clientWidth - 30) / CELL)), rows = Math.ceil(cells.length / columns), ratio = devicePixelRatio || 1;
    canvas.width = columns * CELL * ratio; canvas.height = rows * CELL * ratio;
    canvas.style.width = `${columns * CELL}px`; canvas.style.height = `${rows * CELL}px`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Chunks of the pool in the order of their addresses; ${caption.textContent}`);
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    cells.forEach(([place, fill], i) => {
      const x = i % columns * CELL, y = Math.floor(i / columns) * CELL, side = CELL - 1;
      if (place < 0) return;
      const of = placeColour(moment.places[place].place);
      ctx.globalAlpha = 0.22; ctx.fillStyle = of; ctx.fillRect(x, y, side, side);
      ctx.globalAlpha = 1;
      const high = Math.ceil(side * fill / 10);
      ctx.fillRect(x, y + side - high, side, high);
    });
    canvas.addEventListener("mousemove", event => {
      const bounds = canvas.getBoundingClientRect();
      const at = Math.floor((event.clientY - bounds.top) / CELL) * columns + Math.floor((event.clientX - bounds.left) / CELL);
      const cell = cells[at];
      canvas.tip = cell && cell[0] >= 0 ? `${moment.places[cell[0]].place}, ${cell[1] * 10} % in use` : "";
    });
    return figure;
  }));
};

// ---- moments, keys and looks --------------------------------------------------------------------------------------
const showMoment = () => {
  $("moment").value = Math.max(0, Math.min(data.moments - 1, Math.round(momentTime() / data.end * data.moments) - 1));
  drawFlame();
  drawMaps();
  if (main) main.redraw(false);
};
const setMoment = moment => {
  state.moment = Math.max(0, Math.min(data.moments - 1, moment));
  state.peak = false;
  showMoment();
};
const toPeak = () => {
  const peak = peakOf();
  if (!peak) return;
  state.peak = true;
  state.moment = Math.max(0, Math.min(data.moments - 1, Math.ceil(peak.peak_at / data.end * data.moments) - 1));
  showMoment();
};
const drawAll = () => {
  drawMemory();
  drawSmall("pinned-plot", one => one.pinned);
  drawSmall("moves-plot", one => one.moves);
  document.querySelectorAll("[data-place]").forEach(part => { part.style.background = placeColour(part.dataset.place); });
  showMoment();
};
$("moment").max = data.moments - 1;
$("who").replaceChildren(make("option", { value: "all", textContent: several ? `all ${processes.length} processes` : (processes[0] || { label: "none" }).label }),
  ...(several ? processes.filter(one => one.index !== null).map(one => make("option", { value: one.index, textContent: one.label })) : []));
$("who").addEventListener("change", event => { state.who = event.target.value; state.root = null; drawMemory(); if (state.peak) toPeak(); else showMoment(); });
$("by").addEventListener("change", event => { state.by = event.target.value; drawMemory(); });
$("whole").addEventListener("click", whole);
$("peak").addEventListener("click", toPeak);
$("moment").addEventListener("input", event => setMoment(Number(event.target.value)));
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const turn = () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; drawAll(); };
$("theme").addEventListener("click", turn);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
$("plot").addEventListener("keydown", event => {
  const act = { "+": () => zoom(0.5, 0), "=": () => zoom(0.5, 0), "-": () => zoom(2, 0), ArrowLeft: () => zoom(1, -0.25), ArrowRight: () => zoom(1, 0.25), 0: whole }[event.key];
  if (act) { act(); event.preventDefault(); }
});
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const act = { t: turn, p: toPeak, ",": () => setMoment(state.moment - 1), ".": () => setMoment(state.moment + 1) }[event.key];
  if (act) { act(); event.preventDefault(); }
});
addEventListener("mousemove", event => {
  const target = event.target.closest && (event.target.closest(".frame") || event.target.closest("canvas") || event.target.closest("data[data-of]"));
  const words = target && (target.tip || (target.dataset && target.dataset.of && `${target.value}\n${target.dataset.of}`));
  const tip = $("tip");
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
});
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawAll, 120); });
drawAll();
toPeak();
document.documentElement.dataset.ready = "yes";
})();
