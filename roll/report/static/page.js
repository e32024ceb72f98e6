"use strict";
// Draws the charts of the data in the page. Texts enter through textContent only.
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#3b6fb6", "#d1701f", "#3a8f4d", "#a23a8c", "#8a6d1f", "#2a9aa8", "#b33a3a", "#6b6bd0", "#777777"];
const W = 340, H = 180, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

function svg(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function box(name, parent, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

const finite = (value) => typeof value === "number";

function short(value) {
  if (!finite(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

// One line: for each shown step the mean over runs, and the smallest and largest value.
function line(name, group) {
  const found = data.series[name][group];
  if (!found) return null;
  const steps = data.steps[found.steps];
  const points = [];
  steps.forEach((step, at) => {
    const all = found.values.map((run) => run[at]).filter((value) => value !== null);
    const values = all.filter(finite);
    if (!all.length) return;
    const whole = values.length === all.length && values.length > 0;
    points.push({
      step, all,
      mean: whole ? values.reduce((a, b) => a + b, 0) / values.length : null,
      low: whole ? Math.min(...values) : null,
      high: whole ? Math.max(...values) : null,
    });
  });
  return { name, group, points, several: found.values.length > 1 };
}

function ticks(low, high) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

function scale(lines, panel) {
  const points = lines.flatMap((one) => one.points);
  const ends = points.flatMap((point) => [point.low, point.high]).filter(finite);
  const positive = range(ends.filter((value) => value > 0));
  const log = panel.log && positive[1] / positive[0] > 10;
  const steps = range(points.map((point) => point.step)), values = log ? positive : range(ends);
  if (panel.kind === "stack") values[0] = 0;
  let [low, high] = log ? values.map(Math.log10) : values;
  if (low === 0 && high === 0) high = 1;
  if (low === high) { const more = Math.abs(low) * 0.1 || 1; low -= more; high += more; }
  if (!log && low > 0 && low < 0.4 * high) low = 0;
  if (steps[0] === steps[1]) steps[1] += 1;
  const x = (step) => LEFT + (step - steps[0]) / (steps[1] - steps[0]) * (W - LEFT - RIGHT);
  const y = (value) => {
    const at = log ? Math.log10(value) : value;
    return H - BOTTOM - (at - low) / (high - low) * (H - TOP - BOTTOM);
  };
  const shown = log
    ? ticks(low, high).filter(Number.isInteger).map((power) => 10 ** power)
    : ticks(low, high);
  return { x, y, steps, shown, log };
}

function axes(root, at) {
  for (const value of at.shown) {
    svg("line", { x1: LEFT, x2: W - RIGHT, y1: at.y(value), y2: at.y(value), stroke: "#8883" }, root);
    svg("text", { x: LEFT - 4, y: at.y(value) + 3, "text-anchor": "end" }, root, short(value));
  }
  for (const step of ticks(...at.steps).filter(Number.isInteger)) {
    svg("text", { x: at.x(step), y: H - 6, "text-anchor": "middle" }, root, String(step));
  }
}

function draw(root, one, at, colour, usable) {
  const parts = [[]];
  for (const point of one.points) {
    if (usable(point)) parts.at(-1).push(point); else if (parts.at(-1).length) parts.push([]);
  }
  const to = (key) => (p) => `${at.x(p.step).toFixed(1)},${at.y(p[key]).toFixed(1)}`;
  for (const part of parts.filter((each) => each.length)) {
    if (one.several) {
      const edge = [...part.map(to("high")), ...part.map(to("low")).reverse()];
      svg("polygon", { points: edge.join(" "), fill: colour, opacity: 0.18 }, root);
    }
    if (part.length === 1) {
      svg("circle", { cx: at.x(part[0].step), cy: at.y(part[0].mean), r: 2, fill: colour }, root);
    }
    svg("polyline", { points: part.map(to("mean")).join(" "), fill: "none", stroke: colour, "stroke-width": 1.4 }, root);
  }
}

// Layers of a stack, each on top of the ones before; what a step lacks counts as 0.
function stacked(lines) {
  const base = new Map();
  return lines.map((one) => {
    const own = new Map(one.points.map((point) => [point.step, point.mean]));
    const steps = data.steps[data.series[lines[0].name][one.group].steps];
    const points = steps.map((step) => {
      const low = base.get(step) || 0, mean = finite(own.get(step)) ? own.get(step) : 0;
      base.set(step, low + mean);
      return { step, low, high: low + mean, mean: low + mean, all: [mean] };
    });
    return { ...one, points, several: true };
  });
}

function hover(holder, root, lines, at, labels) {
  const tip = box("div", holder, "", "tip");
  tip.hidden = true;
  const mark = svg("line", { y1: TOP, y2: H - BOTTOM, stroke: "#888", visibility: "hidden" }, root);
  root.addEventListener("mousemove", (event) => {
    const frame = root.getBoundingClientRect();
    const place = (event.clientX - frame.left) / frame.width * W;
    const steps = lines.flatMap((one) => one.points.map((point) => point.step));
    const step = steps.reduce((a, b) => Math.abs(at.x(b) - place) < Math.abs(at.x(a) - place) ? b : a);
    const rows = lines.flatMap((one, i) => one.points.filter((p) => p.step === step)
      .map((p) => `${labels[i]}: ${p.all.map(short).join(", ")}`));
    tip.textContent = [`step ${step}`, ...rows].join("\n");
    tip.hidden = false;
    tip.style.left = `${Math.min(at.x(step) / W * frame.width + 12, frame.width - 120)}px`;
    tip.style.top = "30px";
    for (const end of ["x1", "x2"]) mark.setAttribute(end, at.x(step));
    mark.setAttribute("visibility", "visible");
  });
  root.addEventListener("mouseleave", () => { tip.hidden = true; mark.setAttribute("visibility", "hidden"); });
}

// The part of names that tells them apart.
function told(names) {
  if (names.length === 1) return names;
  const cut = names.map((name) => name.split("/"));
  const all = (parts) => parts.every((each) => each.length > 1 && each[0] === parts[0][0]);
  while (all(cut)) cut.forEach((each) => each.shift());
  cut.forEach((each) => each.reverse());
  while (all(cut)) cut.forEach((each) => each.shift());
  return cut.map((each) => each.reverse().join("/"));
}

function chart(holder, panel, names, groups, title) {
  let lines = names.flatMap((name) => groups.map((group) => line(name, group))).filter((one) => one && one.points.length);
  if (!lines.length) return;
  const shortNames = told(names);
  const labels = lines.map((one) => groups.length > 1 ? data.groups[one.group].label : shortNames[names.indexOf(one.name)]);
  const known = lines.some((one) => one.points.some((point) => finite(point.mean)));
  if (panel.kind === "stack") lines = stacked(lines);
  const made = box("div", holder, undefined, "chart");
  box("h3", made, title);
  if (panel.hint) box("div", made, panel.hint, "dim");
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title }, made);
  if (!known) {
    svg("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, root, "no values");
    return;
  }
  const at = scale(lines, panel);
  axes(root, at);
  const usable = (point) => finite(point.mean) && !(at.log && point.low <= 0);
  lines.forEach((one, i) => {
    const colour = COLOURS[(groups.length > 1 ? one.group : i) % COLOURS.length];
    if (panel.kind !== "stack") return draw(root, one, at, colour, usable);
    const edge = [...one.points.map((p) => [p.step, p.high]), ...one.points.map((p) => [p.step, p.low]).reverse()];
    const points = edge.map(([step, value]) => `${at.x(step).toFixed(1)},${at.y(value).toFixed(1)}`);
    svg("polygon", { points: points.join(" "), fill: colour, opacity: 0.75 }, root);
  });
  for (const alarm of data.alarms) {
    if (alarm.since === null || !names.includes(alarm.metric) || !groups.includes(alarm.group)) continue;
    svg("line", { x1: at.x(alarm.since), x2: at.x(alarm.since), y1: TOP, y2: H - BOTTOM, stroke: "#c0392b", "stroke-dasharray": "4 3" }, root);
  }
  if (labels.length > 1 || groups.length > 1) {
    const keys = box("div", made, undefined, "keys");
    labels.forEach((label, i) => {
      const key = box("span", keys);
      const spot = box("i", key);
      spot.style.background = COLOURS[(groups.length > 1 ? lines[i].group : i) % COLOURS.length];
      key.append(label);
    });
  }
  hover(made, root, lines, at, labels);
}

for (const panel of data.panels) {
  const holder = document.getElementById(panel.section);
  const groups = data.groups.map((_, at) => at);
  const add = () => {
    if (groups.length === 1) chart(holder, panel, panel.names, groups, panel.title);
    else if (panel.kind === "stack") groups.forEach((at) => chart(holder, panel, panel.names, [at], `${panel.title}: ${data.groups[at].label}`));
    else panel.names.forEach((name) => chart(holder, panel, [name], groups, panel.names.length > 1 ? `${panel.title}: ${name}` : panel.title));
  };
  const folded = holder.closest("details");
  if (folded) folded.addEventListener("toggle", add, { once: true }); else add();
}

// A page that a server made asks it for a newer state of the run, and loads itself again then.
const version = document.body.dataset.version;
if (version !== undefined) setInterval(async () => {
  if (document.hidden) return;
  try {
    const answer = await fetch(`version${location.search}`);
    if (answer.ok && await answer.text() !== version) location.reload();
  } catch { /* the server has ended: the page stays as it is */ }
}, 2000);
